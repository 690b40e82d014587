"""What a model is served for, and the numbers that stand in the place of tokens. Imports no torch."""
