"""Code that the HTTP fronts share: types of bodies, reading of bodies, headers, and streams of events."""
