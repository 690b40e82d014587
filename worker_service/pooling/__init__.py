"""What is made of a network's rows instead of tokens."""
