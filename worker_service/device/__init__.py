"""The device that computes: its choice, its memory and its one thread."""
