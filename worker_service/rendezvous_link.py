"""A rank's connection to the meeting point of its group: the worker of rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import grpc.aio

from blockyard.errors import from_rpc_error
from blockyard.service.servers import internal_channel
from blockyard.transport import GRPC, Transport
from blockyard.worker.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from blockyard.security.tls import Peer

SET_SECONDS = 10.0


class RendezvousLink:
    """See `worker_service.groups.rendezvous.RendezvousPoint`. `close` it after use."""

    def __init__(self, address: str, peer: Peer | None, epoch: int, secret: bytes, transport: Transport = GRPC) -> None:
        """`peer`: the identities of rank 0 and of this worker, for TLS; None: plaintext, without identities."""
        self._channel = internal_channel(address, peer, transport)
        self._stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._epoch = epoch
        self._secret = secret

    async def set(self, key: str, value: bytes) -> None:
        """Sets a value under a key; raises BlockyardError."""
        request = worker_pb2.SetRendezvousKeyRequest(epoch=self._epoch, secret=self._secret, key=key, value=value)
        try:
            await self._stub.SetRendezvousKey(request, timeout=SET_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def get(self, key: str, seconds: float) -> bytes:
        """Waits up to `seconds` for a value, and returns it; raises BlockyardError or TimeoutError."""
        request = worker_pb2.GetRendezvousKeyRequest(epoch=self._epoch, secret=self._secret, key=key)
        try:
            return (await self._stub.GetRendezvousKey(request, timeout=seconds)).value
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError(f"no worker set {key} within {seconds:.1f} s") from None
            raise from_rpc_error(error) from None

    async def close(self) -> None:
        await self._channel.close(None)
