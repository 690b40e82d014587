"""Plans steps, and applies their answers."""
