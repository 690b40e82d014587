"""Reads a network from config.json and refuses what cannot be served, for the worker and before it starts.

Standard library only, no torch: `blockyard serve` refuses a model with it before any process starts.
"""
