"""What an operator does to a replica as a whole, between its epochs: asleep, awake."""
