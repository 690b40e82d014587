"""Pooling: how a network's rows become vectors, scores or labels, and the files that state it. No torch."""
