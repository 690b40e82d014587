"""What operators of a simulated cluster do meanwhile, by kind. They call the scheduler from a machine of their own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc.aio

from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.common.v1 import status_pb2
from blockyard.service.servers import internal_channel
from tests.kit.simulation.asks import ADAPTERS, LATE_ADAPTER
from tests.kit.simulation.cluster import SCHEDULER_PORT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.kit.simulation.cluster import Cluster
    from tests.kit.simulation.scenario import Fault

# How long an operator waits for an answer, and before asking again.
TIMEOUT_SECONDS, AGAIN_SECONDS = 5.0, 1.0
MODES = (admin_pb2.LEAVE_MODE_KEEP, admin_pb2.LEAVE_MODE_KEEP, admin_pb2.LEAVE_MODE_WAIT, admin_pb2.LEAVE_MODE_ABORT)


class Operator:
    """Does one thing. `fault`: says what, when and for how long."""

    def __init__(self, cluster: Cluster, fault: Fault) -> None:
        self.seconds = fault.seconds
        self.version = fault.version
        self._transport = cluster.operator.transport
        self._sizes = cluster.sizes
        self._size = fault.size

    def choose(self, *values: Any) -> Any:
        """Chooses one of some values, each time in the same way."""
        return values[int(self._size * 97 % 1 * len(values))]

    @property
    def replica(self) -> str:
        # Workers that are too few for a replica serve nothing.
        num_replicas = self._sizes.ranks.count(max(self._sizes.ranks))
        return str(int(self._size * num_replicas))

    async def ask(self, method: str, *, is_stream: bool = False, **fields: Any) -> Any:
        """Calls the scheduler; returns its last answer, or None if it did not do what it was asked for."""
        request = getattr(admin_pb2, f"{method}Request")(**fields)
        async with internal_channel(f"scheduler:{SCHEDULER_PORT}", transport=self._transport) as channel:
            stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
            call = getattr(stub, method)(request, timeout=TIMEOUT_SECONDS)
            answer = None
            try:
                if not is_stream:
                    return await call
                async for message in call:
                    answer = message
            except grpc.aio.AioRpcError:
                return None
            return answer

    async def call(self, method: str, **fields: Any) -> bool:
        """Calls the scheduler; returns whether it did what it was asked for."""
        return await self.ask(method, **fields) is not None

    async def is_draining(self) -> bool:
        """Whether the replica still has requests although it is to be drained."""
        answer = await self.ask("GetStatus")
        replicas = [] if answer is None else answer.scheduler.replicas
        return any(
            str(each.replica_id) == self.replica and each.drain_state == status_pb2.DRAIN_STATE_DRAINING
            for each in replicas
        )

    async def insist(self, method: str, **fields: Any) -> None:
        """Calls the scheduler until it has done it."""
        while not await self.call(method, **fields):  # noqa: ASYNC110 - it has to be asked again
            await asyncio.sleep(AGAIN_SECONDS)


async def _drain(operator: Operator) -> None:
    """Drains a replica, and takes it back some time after it has no requests any more."""
    await operator.call("DrainReplica", replica=operator.replica)
    while await operator.is_draining():  # noqa: ASYNC110 - nobody tells when it has ended
        await asyncio.sleep(AGAIN_SECONDS)
    await asyncio.sleep(operator.seconds)
    await operator.insist("UndrainReplica", replica=operator.replica)


async def _reset_cache(operator: Operator) -> None:
    """Empties the prefix caches."""
    await operator.call("ResetPrefixCache")


async def _sleep(operator: Operator) -> None:
    """Sends a replica to sleep, and wakes it later."""
    mode, level = operator.choose(*MODES), operator.choose(1, 2)
    await operator.call("SleepReplica", replica=operator.replica, level=level, mode=mode)
    await asyncio.sleep(operator.seconds)
    await operator.insist("WakeReplica", replica=operator.replica, reload=True)


async def _update_weights(operator: Operator) -> None:
    """Has all replicas load the weights anew, under a new name."""
    version, mode, together = operator.version, operator.choose(*MODES), operator.choose(True, False)
    await operator.insist("UpdateWeights", is_stream=True, version=version, mode=mode, together=together)


def _choose_adapter(operator: Operator) -> str:
    return operator.choose(*ADAPTERS, LATE_ADAPTER)


async def _load_adapter(operator: Operator) -> None:
    name = _choose_adapter(operator)
    await operator.call("LoadLora", name=name, path=name, load_inplace=operator.seconds < 1.0)


async def _unload_adapter(operator: Operator) -> None:
    """Unloads an adapter, and loads it again later."""
    name = _choose_adapter(operator)
    await operator.call("UnloadLora", name=name)
    await asyncio.sleep(operator.seconds)
    await operator.call("LoadLora", name=name, path=name)


async def _pin_adapter(operator: Operator) -> None:
    """Pins an adapter for some time."""
    name = _choose_adapter(operator)
    await operator.call("PinLora", name=name, pinned=True)
    await asyncio.sleep(operator.seconds)
    await operator.call("PinLora", name=name, pinned=False)


OPERATIONS: dict[str, Callable[[Operator], Awaitable[None]]] = {
    "drain": _drain,
    "reset cache": _reset_cache,
    "sleep": _sleep,
    "update weights": _update_weights,
    "load adapter": _load_adapter,
    "unload adapter": _unload_adapter,
    "pin adapter": _pin_adapter,
}
