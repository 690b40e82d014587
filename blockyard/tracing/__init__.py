"""Spans: made and sent by OpenTelemetry where traces are asked for, and nothing at all where not."""
