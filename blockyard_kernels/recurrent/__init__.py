"""The ops of layers with a state."""
