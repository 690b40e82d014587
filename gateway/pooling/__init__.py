"""Calls for vectors, scores and labels of texts. Each input is a request of its own; a call is answered completely."""
