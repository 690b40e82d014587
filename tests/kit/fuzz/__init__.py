"""Messages that cannot be, into the real services, in one process. `python -m tests.kit.fuzz` runs all of it."""
