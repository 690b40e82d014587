"""`blockyard doctor`: checks whether this machine is ready to serve."""
