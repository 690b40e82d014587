"""Requests that run, and the connection to the scheduler that runs them."""
