"""gRPC between simulated processes: servers and channels with grpc.aio's interface, over the simulated network.

A process gets a `SimTransport` where a real one makes grpc.aio's servers and channels. What stands above gRPC's core in
grpc.aio itself, such as the client's call objects, is used as it is; the core is replaced:

    channel.py       a channel: connecting, and again after a pause; keepalive
    client_call.py   the client's side of a call
    server.py        a server: connections, stopping
    server_call.py   the server's side of a call: handlers, interceptors, contexts
    streams.py       frames and windows, which both sides share

How the parts fit together, in the least simulation:

    async def main() -> bytes:
        loop = asyncio.get_running_loop()
        network = Network(loop)
        server, client = loop.owner("server"), loop.owner("client")
        await loop.spawn(server, serve(SimTransport(network, "server", server)))  # listens at 0.0.0.0:50051
        call = loop.spawn(client, ask(SimTransport(network, "client", client).channel("server:50051")))
        loop.call_later(0.5, network.kill, server)
        return await call

    outcome = run(main(), seed=1)

tests/integration/kit/simulation/test_conformance.py runs the same calls over this and over the real grpc.aio. Left out
is what Blockyard does not use: TLS, compression, client interceptors, call credentials, sync handlers, limits of
concurrent calls and connections, limits of metadata, and load balancing over several addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.kit.simulation.channel import SimChannel
from tests.kit.simulation.server import SimServer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.kit.simulation.loop import Owner
    from tests.kit.simulation.network import Network

    Options = Sequence[tuple[str, Any]]


class SimTransport:
    """Makes the servers and channels of one process.

    Args:
        node: the name of its machine in the network.
        owner: the process; None: the one that makes this.
    """

    def __init__(self, network: Network, node: str, owner: Owner | None = None) -> None:
        self._network = network
        self._node = node
        self._owner = owner or network.loop.current_owner()

    def server(self, options: Options | None = None, interceptors: Sequence[Any] = ()) -> SimServer:
        return SimServer(self._network, self._node, self._owner, options, interceptors)

    def channel(self, address: str, options: Options | None = None, credentials: None = None) -> SimChannel:
        """Makes a channel to `node:port`. There is no TLS in a simulation, so there are no credentials either."""
        assert credentials is None
        return SimChannel(self._network, self._node, self._owner, address, options)
