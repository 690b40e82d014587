"""`blockyard doctor`: whether this machine is ready to serve."""
