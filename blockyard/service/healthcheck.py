"""Asks a service for its health, for a container's health check.

`python -m blockyard.service.healthcheck ADDRESS [SERVICE]`

Exits with 0 if it is serving, else with 1 and a line on standard error.
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_SECONDS = 2.0


def check(address: str, service: str = "readiness") -> str:
    """Asks `host:port` or `unix:/path` about "readiness" or "liveness", or a worker whether it is "loaded".

    Returns the problem; empty if the service is healthy.
    """
    # A service in the same container is never behind a proxy.
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            return f"{address}: {error.code().name}: {error.details()}"  # type: ignore[attr-defined]
    if response.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return f"{address}: {service} is {health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)}"


def main(arguments: list[str]) -> None:
    if len(arguments) not in (1, 2):
        sys.exit("usage: python -m blockyard.service.healthcheck ADDRESS [readiness | liveness | loaded]")
    if problem := check(*arguments):
        sys.exit(problem)


if __name__ == "__main__":
    main(sys.argv[1:])
