"""The values that cross a wire, each declared once: plain dataclasses and enums. Does no I/O and knows no messages."""
