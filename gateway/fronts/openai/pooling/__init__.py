"""Embeddings, reranking, scores and labels over HTTP."""
