"""Beam search: which continuations are followed, and what that changes for sequences."""
