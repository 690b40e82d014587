"""Converts between protobuf messages and the gateway's values."""
