"""What fits: memory and its division, from sizes alone, for the worker and before it starts. No torch."""
