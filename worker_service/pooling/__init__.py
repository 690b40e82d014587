"""Pooling: vectors, scores or labels from a network's rows, instead of tokens."""
