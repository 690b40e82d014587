"""Drafting: guesses at the next tokens of sequences, and how many of them are worth their time."""
