"""Grammars of sequences: a model's vocabulary for them, where each sequence is in its own, and masks of its tokens."""
