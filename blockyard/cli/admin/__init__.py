"""`blockyard admin`: what an operator asks of a running system."""
