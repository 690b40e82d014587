"""Vectors, scores and labels of texts: calls whose inputs are requests of their own, answered whole."""
