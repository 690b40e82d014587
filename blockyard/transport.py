"""Makes the servers and channels of gRPC: the one place where the product meets gRPC's core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.channels import Options


class Transport(Protocol):
    """What carries calls between processes."""

    def server(self, options: Options, interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]]) -> grpc.aio.Server:
        """Makes a server that listens nowhere yet."""
        ...

    def channel(
        self, address: str, options: Options, credentials: grpc.ChannelCredentials | None = None
    ) -> grpc.aio.Channel:
        """Opens a channel; with credentials it uses TLS."""
        ...


class GrpcTransport:
    """gRPC over sockets."""

    def server(self, options: Options, interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]]) -> grpc.aio.Server:
        return grpc.aio.server(options=options, interceptors=interceptors)

    def channel(
        self, address: str, options: Options, credentials: grpc.ChannelCredentials | None = None
    ) -> grpc.aio.Channel:
        if credentials is None:
            return grpc.aio.insecure_channel(address, options)
        return grpc.aio.secure_channel(address, credentials, options)


GRPC = GrpcTransport()
