"""The page at `/`: a playground, charts of the system's load, and `/status`, which feeds them."""
