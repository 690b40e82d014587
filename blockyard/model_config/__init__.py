"""Reads a network from config.json and refuses models that cannot be served.

Uses the standard library only, no torch: `blockyard serve` checks a model before any process starts.
"""
