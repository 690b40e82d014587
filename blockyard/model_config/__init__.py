"""What config.json says of a network, and what of it cannot be served: for the worker, and for whoever asks before it.

Standard library only, no torch: `blockyard serve` refuses a model with it before any process starts.
"""
