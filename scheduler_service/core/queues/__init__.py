"""Requests that wait: their order, their limits and their deadlines."""
