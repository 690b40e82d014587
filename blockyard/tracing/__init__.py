"""Tracing: spans are created and sent by OpenTelemetry if tracing is on; otherwise nothing is imported."""
