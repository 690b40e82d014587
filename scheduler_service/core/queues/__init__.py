"""Queues of requests: their order, their limits and their deadlines."""
