"""Code that every server process shares: the gRPC server, health, metrics, signals."""
