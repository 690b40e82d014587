"""Puts load on a server and measures latencies and rates from the clients' side."""
