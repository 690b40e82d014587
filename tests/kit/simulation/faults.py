"""What goes wrong in a simulated cluster, by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.kit.simulation.channel import RESETS
from tests.kit.simulation.cluster import GRPC_PORT
from tests.kit.simulation.operators import OPERATIONS, Operator
from tests.kit.simulation.points import AT_POINTS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.kit.simulation.cluster import Cluster
    from tests.kit.simulation.scenario import Fault

# The largest factor by which a process is slowed.
MAX_SLOWDOWN = 2000.0
# The largest chance that something goes wrong at a point.
MAX_CHANCE = 0.05


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
    """Breaks one of the connections that stand between two machines, or if there is none, between any two."""
    standing = cluster.network.connections()
    between = [end for end in standing if {end.node, end.peer.node} == set(fault.targets)]
    if chosen := between or standing:
        cluster.network.break_connection(chosen[int(fault.size * len(chosen))])


def _reset(cluster: Cluster, fault: Fault) -> None:
    """A proxy resets the calls of one of the connections between clients and gateways."""
    public = [end for end in cluster.network.connections() if end.peer.address.endswith(f":{GRPC_PORT}")]
    if public:
        reason = RESETS[int(fault.size * 97 % 1 * len(RESETS))]
        cluster.network.break_connection(public[int(fault.size * len(public))], reason)


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


def _at_points(cluster: Cluster, fault: Fault) -> None:
    cluster.points.chance = fault.size * MAX_CHANCE
    cluster.loop.call_later(fault.seconds, setattr, cluster.points, "chance", 0.0)


def _operate(work: Callable[[Operator], Awaitable[None]]) -> Callable[[Cluster, Fault], None]:
    """Returns a fault that is no fault, but what an operator does."""

    def operate(cluster: Cluster, fault: Fault) -> None:
        task = cluster.loop.spawn(cluster.operator.owner, work(Operator(cluster, fault)), f"operator-{fault.kind}")
        cluster.operations.append(task)

    return operate


# What a fake worker can be told to do wrong: an attribute of it, and its value.
SPOILS: dict[str, tuple[str, object]] = {
    "refuse a step": ("refuse_next", "on purpose"),
    "answer wrong": ("skew_next", True),
    "lose the group": ("lose_group_next", True),
    "skew a rank": ("num_epochs_to_skew", 1),
}


def _spoil(name: str, value: object) -> Callable[[Cluster, Fault], None]:
    """Returns a fault that lets a fake worker do something wrong."""

    def spoil(cluster: Cluster, fault: Fault) -> None:
        workers = cluster.sizes.workers
        worker = cluster.nodes[workers[int(fault.size * len(workers))]]
        if worker.service is not None:
            setattr(worker.service, name, value)

    return spoil


# The kinds after which tokens come as soon as ever, where they strike workers alone.
PROMPT = frozenset({"kill", "kill silently", "kill two", "stop", "freeze", "slow", "jump", *SPOILS, *OPERATIONS})
# The kinds that strike both targets.
PAIRS = frozenset({"kill two", "part", "flap", "delay"})
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
    "reset": _reset,
    "delay": _delay,
    "stop": _stop,
    "jump": _jump,
    AT_POINTS: _at_points,
    **{kind: _spoil(*what) for kind, what in SPOILS.items()},
    **{kind: _operate(work) for kind, work in OPERATIONS.items()},
}
# The kinds that strike what they choose themselves.
OF_NO_TARGET = frozenset(
    {"break", "reset", "at points", "refuse a step", "answer wrong", "lose the group", "skew a rank", *OPERATIONS}
)
