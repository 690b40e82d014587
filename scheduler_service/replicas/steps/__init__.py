"""Steps on their way to a worker: how many, since when, and what they cost."""
