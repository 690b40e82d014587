"""Beam search: which continuations are followed, and what that does to sequences."""
