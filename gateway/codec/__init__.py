"""Decodes messages into values and encodes them back."""
