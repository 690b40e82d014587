"""`blockyard top`: a live view of a running system."""
