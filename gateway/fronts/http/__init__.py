"""What every HTTP API of the gateway shares: the server, access control, CORS and the metrics route."""
