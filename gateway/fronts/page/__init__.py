"""The page at `/`: a playground and charts of what the system does, and `/status`, which feeds them."""
