"""A cluster under simulation."""
