"""The client library. Imports nothing of `blockyard.service`: it needs grpcio and protobuf alone."""
