"""What mixes the rows of a sequence in a layer."""
