"""`python -m gateway`."""

from blockyard.service import grpc_environment

grpc_environment.prepare()

from gateway.server import main  # noqa: E402 - it imports gRPC

if __name__ == "__main__":
    main()
