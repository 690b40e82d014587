"""What goes wrong on the simulated network, as calls over it see it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from blockyard.channels import channel_options
from blockyard.errors import BlockyardError, Reason, from_rpc_error
from blockyard.service.health import add_health
from blockyard.service.interceptors import ErrorInterceptor
from tests.kit.simulation.loop import Owner, SimLoop, run
from tests.kit.simulation.network import Network
from tests.kit.simulation.transport import SimTransport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

UNAVAILABLE, DEADLINE = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED
# Asks after 2 s of silence, and waits 1 s for the answer.
KEEPALIVE = [("grpc.keepalive_time_ms", 2000), ("grpc.keepalive_timeout_ms", 1000)]
QUICK = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100)]


class Cluster:
    """A server that echoes, and a channel to it."""

    def __init__(self, options: list[tuple[str, Any]] = KEEPALIVE) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self.loop = loop
        self.network = Network(loop)
        self.seen: list[Any] = []
        self.ended_at = 0.0
        self.client = loop.owner("client")
        self.channel = SimTransport(self.network, "client", self.client).channel("server:50051", [*options, *QUICK])
        self.server_options: list[tuple[str, Any]] = []

    async def start(self) -> Owner:
        owner = self.loop.owner("server")
        await self.loop.spawn(owner, self._serve(owner))
        return owner

    async def _serve(self, owner: Owner) -> None:
        server = SimTransport(self.network, "server", owner).server(self.server_options)
        handlers = {"Talk": grpc.stream_stream_rpc_method_handler(self._talk)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Service", handlers)])
        server.add_insecure_port("0.0.0.0:50051")
        await server.start()
        # As in grpc.aio, one that is dropped stops.
        self.server = server

    async def _talk(self, requests: Any, context: Any) -> None:
        try:
            async for message in requests:
                self.seen.append(message)
                await context.write(message)
        except asyncio.CancelledError:
            self.ended_at = self.loop.time()
            self.seen.append("cancelled")
            raise

    def talk(self, **options: Any) -> Any:
        return self.channel.stream_stream("/test.Service/Talk")(**options)

    async def say(self, **options: Any) -> Any:
        """Says one thing on a new call, and returns the echo or the code of the error."""
        call = self.talk(**options)
        try:
            await call.write(b"hello")
            answer = await call.read()
            await call.done_writing()
            return answer
        except (grpc.RpcError, asyncio.InvalidStateError):
            return await call.code()

    async def time_to_end(self, call: Any) -> tuple[grpc.StatusCode, float]:
        begin = self.loop.time()
        try:
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.RpcError:
            pass
        return await call.code(), self.loop.time() - begin


def result(main: Coroutine[Any, Any, Any], seed: int = 0) -> Any:
    return run(main, seed).result


SEEDS = pytest.mark.parametrize("seed", range(5))


def test_a_killed_server_ends_its_calls_and_a_successor_takes_new_ones() -> None:
    async def main() -> None:
        cluster = Cluster()
        owner = await cluster.start()
        call = cluster.talk()
        await call.write(b"x")
        assert await call.read() == b"x"
        cluster.network.kill(owner)
        code, seconds = await cluster.time_to_end(call)
        assert (code, seconds < 0.01) == (UNAVAILABLE, True)
        assert await cluster.say() is UNAVAILABLE
        await cluster.start()
        assert await cluster.say(wait_for_ready=True) == b"hello"
        assert cluster.seen == [b"x", b"hello"]

    result(main())


def test_a_server_that_lost_its_power_is_noticed_by_keepalive() -> None:
    async def main() -> None:
        cluster = Cluster()
        owner = await cluster.start()
        call = cluster.talk()
        await call.write(b"x")
        await call.read()
        cluster.network.kill(owner, silently=True)
        code, seconds = await cluster.time_to_end(call)
        assert (code, await call.details()) == (UNAVAILABLE, "ping timeout")
        assert 2.9 < seconds < 3.1

    result(main())


def test_without_keepalive_nothing_is_noticed() -> None:
    async def main() -> None:
        cluster = Cluster(options=[])
        owner = await cluster.start()
        call = cluster.talk(timeout=10_000)
        await call.write(b"x")
        await call.read()
        cluster.network.kill(owner, silently=True)
        code, seconds = await cluster.time_to_end(call)
        assert code is DEADLINE
        assert 9_999 < seconds < 10_001

    result(main())


def test_a_killed_client_cancels_its_calls_at_the_server() -> None:
    async def main() -> None:
        cluster = Cluster()
        await cluster.start()

        async def wait_for_ever() -> None:
            call = cluster.talk()
            await call.write(b"x")
            try:
                await asyncio.Event().wait()
            finally:
                cluster.seen.append("a killed client runs no code")

        cluster.loop.spawn(cluster.client, wait_for_ever())
        await asyncio.sleep(1)
        cluster.network.kill(cluster.client)
        await asyncio.sleep(1)
        assert cluster.seen == [b"x", "cancelled"]

    result(main())


@SEEDS
def test_a_partition_ends_connections_and_heals(seed: int) -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.server_options = KEEPALIVE
        await cluster.start()
        call = cluster.talk()
        await call.write(b"x")
        await call.read()
        begin = cluster.loop.time()
        block = cluster.network.block(["client"], ["server"])
        await call.write(b"lost")
        code, seconds = await cluster.time_to_end(call)
        assert code is UNAVAILABLE
        assert 2.9 < seconds < 3.1
        assert await cluster.say(timeout=5) is DEADLINE
        assert cluster.seen == [b"x", "cancelled"]
        assert 2.9 < cluster.ended_at - begin < 3.1
        block.lift()
        block.lift()
        assert await cluster.say(wait_for_ready=True) == b"hello"

    result(main(), seed)


@pytest.mark.parametrize("blocked", [("client", "server"), ("server", "client")])
def test_a_partition_one_way(blocked: tuple[str, str]) -> None:
    async def main() -> None:
        cluster = Cluster()
        await cluster.start()
        call = cluster.talk()
        await call.write(b"x")
        await call.read()
        cluster.network.block(blocked[:1], blocked[1:], both_ways=False)
        await call.write(b"y")
        code, seconds = await cluster.time_to_end(call)
        assert code is UNAVAILABLE
        assert 2.9 < seconds < 3.1
        await asyncio.sleep(1)
        # The end of the connection passes the open way.
        assert cluster.seen == ([b"x"] if blocked[0] == "client" else [b"x", b"y", "cancelled"])

    result(main())


def test_what_a_short_partition_held_arrives_in_order() -> None:
    async def main() -> None:
        cluster = Cluster()
        await cluster.start()
        call = cluster.talk()
        await call.write(b"first")
        await call.read()
        for seconds in (1.0, 2.5):
            block = cluster.network.block(["client"], ["server"])
            for number in range(5):
                await call.write(b"%d" % number)
            await asyncio.sleep(seconds)
            block.lift()
            assert [await call.read() for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]

    result(main())


def test_a_connection_that_flaps_keeps_what_it_carries() -> None:
    async def main() -> None:
        cluster = Cluster()
        await cluster.start()
        call = cluster.talk()
        cluster.network.flap(["client"], ["server"], seconds=0.5, times=20)
        for number in range(100):
            await call.write(b"%d" % number)
            assert await call.read() == b"%d" % number
            await asyncio.sleep(0.2)

    outcome = run(main())
    assert outcome.virtual_seconds > 20


@SEEDS
def test_a_broken_connection_delivers_the_first_of_what_was_under_way(seed: int) -> None:
    async def main() -> int:
        cluster = Cluster()
        await cluster.start()
        call = cluster.talk()
        await call.write(b"begin")
        await call.read()
        for number in range(20):
            await call.write(b"%d" % number)
        (connection,) = cluster.network.connections()
        cluster.network.break_connection(connection)
        begin = cluster.loop.time()
        code, seconds = await cluster.time_to_end(call)
        assert code is UNAVAILABLE
        assert seconds < 0.3
        await asyncio.sleep(0.3)
        *messages, end = cluster.seen
        assert end == "cancelled"
        assert messages == [b"begin", *(b"%d" % number for number in range(len(messages) - 1))]
        # Each side notices by itself.
        assert cluster.ended_at != begin + seconds
        assert await cluster.say() == b"hello"
        return len(messages)

    result(main(), seed)


def test_breaks_lose_different_numbers_of_messages() -> None:
    async def main() -> int:
        cluster = Cluster()
        await cluster.start()
        call = cluster.talk()
        await call.write(b"begin")
        await call.read()
        for number in range(20):
            await call.write(b"%d" % number)
        cluster.network.break_connection(cluster.network.connections()[0])
        await asyncio.sleep(1)
        return len(cluster.seen)

    assert len({result(main(), seed) for seed in range(20)}) > 5


def test_a_half_sent_message_is_never_delivered() -> None:
    async def main() -> list[Any]:
        cluster = Cluster()
        cluster.server_options = [("grpc.max_receive_message_length", -1)]
        await cluster.start()
        call = cluster.talk()
        await call.write(b"x")
        await call.read()
        # Takes 0.1 s on the way.
        writing = asyncio.create_task(call.write(bytes(100_000_000)))
        await asyncio.sleep(0.05)
        cluster.network.break_connection(cluster.network.connections()[0])
        with pytest.raises(grpc.RpcError):
            await writing
        await asyncio.sleep(1)
        return cluster.seen

    outcomes = [result(main(), seed) for seed in range(10)]
    assert [b"x", "cancelled"] in outcomes


def test_delays_add_up_and_end() -> None:
    async def main() -> None:
        cluster = Cluster()
        await cluster.start()
        call = cluster.talk()
        for seconds in (0.0, 1.5, 0.0):
            cluster.network.delay(["server"], ["client"], seconds)
            begin = cluster.loop.time()
            await call.write(b"x")
            await call.read()
            assert seconds < cluster.loop.time() - begin < seconds + 0.01

    result(main())


def test_a_frozen_server_is_noticed_and_connects_once_it_thaws() -> None:
    async def main() -> None:
        cluster = Cluster()
        owner = await cluster.start()
        call = cluster.talk()
        await call.write(b"x")
        await call.read()
        cluster.loop.freeze(owner)
        code, seconds = await cluster.time_to_end(call)
        assert (code, 2.9 < seconds < 3.1) == (UNAVAILABLE, True)
        assert await cluster.say(timeout=1) is DEADLINE
        waiting = asyncio.create_task(cluster.say())
        await asyncio.sleep(1)
        assert not waiting.done()
        cluster.loop.thaw(owner)
        assert await waiting == b"hello"

    result(main())


def test_an_attempt_to_connect_ends_after_its_time() -> None:
    async def main() -> float:
        cluster = Cluster(options=[("grpc.min_reconnect_backoff_ms", 5000)])
        await cluster.start()
        cluster.network.block(["client"], ["server"])
        assert await cluster.say() is UNAVAILABLE
        return cluster.loop.time()

    assert run(main()).virtual_seconds == pytest.approx(5, abs=0.01)


def test_where_nobody_listens_a_call_fails_after_the_latency() -> None:
    async def main() -> None:
        assert await Cluster().say() is UNAVAILABLE

    assert 0 < run(main()).virtual_seconds < 0.01


def test_ports_and_names() -> None:
    async def main() -> None:
        cluster = Cluster()
        owner = await cluster.start()
        cluster.network.hosts["10.0.0.7"] = "server"
        transport = SimTransport(cluster.network, "server", owner)
        other = transport.server()
        first, second = (other.add_insecure_port("localhost:0") for _ in range(2))
        assert 0 < first != second > 0
        for address in ("server:50051", "0.0.0.0:50051", "client:50052"):
            with pytest.raises(RuntimeError, match="Failed to bind"):
                other.add_insecure_port(address)
        await other.start()
        for address in (f"localhost:{first}", f"server:{second}", f"10.0.0.7:{second}", f"dns:///10.0.0.7:{first}"):
            async with transport.channel(address) as channel:
                await channel.channel_ready()
        await other.stop(None)
        await transport.server().stop(None)
        assert transport.server().add_insecure_port(f"server:{first}") == first

    result(main())


def test_the_products_own_services_run_on_it() -> None:
    async def fail(request: Any, context: Any) -> Any:
        raise BlockyardError(Reason.QUEUE_FULL, "too many", retry_after_seconds=2.0)

    async def main() -> None:
        cluster = Cluster()
        transport = SimTransport(cluster.network, "gateway")
        server = transport.server(interceptors=[ErrorInterceptor()])
        add_health(server, lambda: True, lambda: False)
        reflection.enable_server_reflection(["a.Service"], server)
        methods = {"Fail": grpc.unary_unary_rpc_method_handler(fail)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("a.Service", methods)])
        address = f"gateway:{server.add_insecure_port('0.0.0.0:0')}"
        await server.start()
        options = channel_options(1_000_000)
        async with SimTransport(cluster.network, "client").channel(address, options) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == 1
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await stub.Check(health_pb2.HealthCheckRequest(service="x"))
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="liveness"))
            assert (await watch.read()).status == 2
            watch.cancel()
            listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(_list_services())
            async for answer in listing:
                assert [service.name for service in answer.list_services_response.service] == ["a.Service"]
            with pytest.raises(grpc.aio.AioRpcError) as full:
                await channel.unary_unary("/a.Service/Fail")(b"")
            error = from_rpc_error(full.value)
            assert (error.reason, error.message, error.retry_after_seconds) == (Reason.QUEUE_FULL, "too many", 2.0)
        await server.stop(1.0)

    result(main())


async def _list_services() -> AsyncIterator[Any]:
    yield reflection_pb2.ServerReflectionRequest(list_services="")
