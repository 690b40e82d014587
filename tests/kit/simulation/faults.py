"""What goes wrong in a simulated cluster, by kind."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc.aio

from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from tests.kit.simulation.asks import ADAPTERS, LATE_ADAPTER
from tests.kit.simulation.cluster import SCHEDULER_PORT

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kit.simulation.cluster import Cluster
    from tests.kit.simulation.scenario import Fault

# The largest factor by which a process is slowed.
MAX_SLOWDOWN = 2000.0


def _kill(cluster: Cluster, fault: Fault) -> None:
    cluster.nodes[fault.targets[0]].kill()


def _kill_silently(cluster: Cluster, fault: Fault) -> None:
    cluster.nodes[fault.targets[0]].kill(silently=True)


def _kill_two(cluster: Cluster, fault: Fault) -> None:
    for name in fault.targets:
        cluster.nodes[name].kill()


def _freeze(cluster: Cluster, fault: Fault) -> None:
    owner = cluster.nodes[fault.targets[0]].process.owner
    cluster.loop.freeze(owner)
    cluster.loop.call_later(fault.seconds, cluster.loop.thaw, owner)


def _slow(cluster: Cluster, fault: Fault) -> None:
    owner = cluster.nodes[fault.targets[0]].process.owner
    cluster.loop.slow(owner, 1.0 + fault.size * MAX_SLOWDOWN)
    cluster.loop.call_later(fault.seconds, cluster.loop.slow, owner, 1.0)


def _part(cluster: Cluster, fault: Fault) -> None:
    one, other = fault.targets
    block = cluster.network.block([one], [other], both_ways=fault.size < 0.5)
    cluster.loop.call_later(fault.seconds, block.lift)


def _isolate(cluster: Cluster, fault: Fault) -> None:
    one = fault.targets[0]
    others = [name for name in cluster.nodes if name != one]
    block = cluster.network.block([one], others)
    cluster.loop.call_later(fault.seconds, block.lift)


def _flap(cluster: Cluster, fault: Fault) -> None:
    one, other = fault.targets
    cluster.network.flap([one], [other], fault.seconds / 4, 1 + int(fault.size * 4))


def _break(cluster: Cluster, fault: Fault) -> None:
    """Breaks one of the connections that stand, of any two processes."""
    if connections := cluster.network.connections():
        cluster.network.break_connection(connections[int(fault.size * len(connections))])


def _delay(cluster: Cluster, fault: Fault) -> None:
    one, other = fault.targets
    cluster.network.delay([one], [other], fault.size)
    cluster.loop.call_later(fault.seconds, cluster.network.delay, [one], [other], 0.0)


def _stop(cluster: Cluster, fault: Fault) -> None:
    """A process is told to stop, and does so by itself."""
    node = cluster.nodes[fault.targets[0]]
    node.call(node.stop)


def _jump(cluster: Cluster, fault: Fault) -> None:
    """The wall clock of a machine jumps, by an hour at most, forward or back."""
    cluster.nodes[fault.targets[0]].process.wall_offset += (fault.size - 0.5) * 7200


def _operate(cluster: Cluster, method: str, **fields: Any) -> None:
    """An operator calls the scheduler, which may refuse, or not be there."""
    scheduler = cluster.nodes["scheduler"]

    async def call() -> None:
        channel = scheduler.process.transport.channel(f"scheduler:{SCHEDULER_PORT}", ())
        stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
        with suppress(grpc.aio.AioRpcError):
            await getattr(stub, method)(getattr(admin_pb2, f"{method}Request")(**fields), timeout=5)

    scheduler.call(lambda: asyncio.ensure_future(call()))


def _drain(cluster: Cluster, fault: Fault) -> None:
    """An operator drains a replica, and takes it back later."""
    replica = str(int(fault.size * len(cluster.sizes.ranks)))
    _operate(cluster, "DrainReplica", replica=replica)
    # A scheduler that is started again has forgotten the drain.
    cluster.loop.call_later(fault.seconds, partial(_operate, cluster, "UndrainReplica", replica=replica))


def _reset_cache(cluster: Cluster, _: Fault) -> None:
    """An operator empties the prefix caches."""
    _operate(cluster, "ResetPrefixCache")


def _choose_adapter(fault: Fault) -> str:
    names = (*ADAPTERS, LATE_ADAPTER)
    return names[int(fault.size * len(names))]


def _load_adapter(cluster: Cluster, fault: Fault) -> None:
    name = _choose_adapter(fault)
    _operate(cluster, "LoadLora", name=name, path=name, load_inplace=fault.seconds < 1.0)


def _unload_adapter(cluster: Cluster, fault: Fault) -> None:
    """An operator unloads an adapter, and loads it again later."""
    name = _choose_adapter(fault)
    _operate(cluster, "UnloadLora", name=name)
    cluster.loop.call_later(fault.seconds, partial(_operate, cluster, "LoadLora", name=name, path=name))


def _pin_adapter(cluster: Cluster, fault: Fault) -> None:
    name = _choose_adapter(fault)
    _operate(cluster, "PinLora", name=name, pinned=True)
    cluster.loop.call_later(fault.seconds, partial(_operate, cluster, "PinLora", name=name, pinned=False))


def _spoil(name: str, value: object) -> Callable[[Cluster, Fault], None]:
    """Returns a fault that lets a fake worker do something wrong."""

    def spoil(cluster: Cluster, fault: Fault) -> None:
        workers = cluster.sizes.workers
        worker = cluster.nodes[workers[int(fault.size * len(workers))]]
        if worker.service is not None:
            setattr(worker.service, name, value)

    return spoil


# The kinds that strike both targets.
PAIRS = frozenset({"kill two", "part", "flap", "delay"})
# The kinds that strike what they choose themselves.
OF_NO_TARGET = frozenset(
    {
        *("drain", "reset cache", "break", "load adapter", "unload adapter", "pin adapter"),
        *("refuse a step", "answer wrong", "lose the group", "skew a rank"),
    }
)
FAULTS: dict[str, Callable[[Cluster, Fault], None]] = {
    "kill": _kill,
    "kill silently": _kill_silently,
    "kill two": _kill_two,
    "freeze": _freeze,
    "slow": _slow,
    "part": _part,
    "isolate": _isolate,
    "flap": _flap,
    "break": _break,
    "delay": _delay,
    "stop": _stop,
    "jump": _jump,
    "drain": _drain,
    "reset cache": _reset_cache,
    "refuse a step": _spoil("refuse_next", "on purpose"),
    "answer wrong": _spoil("skew_next", value=True),
    "lose the group": _spoil("lose_group_next", value=True),
    "skew a rank": _spoil("num_epochs_to_skew", 1),
    "load adapter": _load_adapter,
    "unload adapter": _unload_adapter,
    "pin adapter": _pin_adapter,
}
