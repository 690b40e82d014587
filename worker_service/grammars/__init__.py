"""Grammars of sequences: the model's vocabulary, the state of each sequence in its grammar, and token masks."""
