"""The server, access control, CORS and metrics route that all HTTP APIs of the gateway share."""
