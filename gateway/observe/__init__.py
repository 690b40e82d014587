"""Metrics, request logs and spans of the gateway, for operators."""
