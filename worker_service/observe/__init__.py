"""Metrics, spans and profiles of a worker, for its operators."""
