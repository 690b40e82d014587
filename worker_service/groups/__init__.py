"""Groups: the workers of a replica join and leave them."""
