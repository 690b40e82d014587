"""Encodes the contract's values as messages and decodes them, both directions of a message side by side."""
