"""What the HTTP fronts share: the types of bodies, reading them, headers, and streams of events."""
