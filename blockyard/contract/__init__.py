"""The values that services exchange, each declared once as a plain dataclass or enum. Imports no protobuf."""
