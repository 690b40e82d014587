"""Steps in flight to a worker: how many, since when, and what they cost."""
