"""Computes which models, blocks and steps fit into memory, from sizes alone and without torch."""
