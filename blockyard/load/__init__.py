"""Puts a load on a server and measures what its clients see."""
