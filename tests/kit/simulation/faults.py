"""What goes wrong in a simulated cluster, by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


def _drain_worker(cluster: Cluster, fault: Fault) -> None:
    """A worker is told to stop, says so, and ends some time later."""
    node = next((cluster.nodes[name] for name in fault.targets if name.startswith("worker")), None)
    if node is not None and node.service is not None and node.process.owner.alive and not node.process.owner.frozen:
        cluster.loop.call_soon(node.service.drain, context=cluster.loop.context_of(node.process.owner))
        process = node.process
        cluster.loop.call_later(fault.seconds, lambda: node.kill() if node.process is process else None)


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
    "drain worker": _drain_worker,
}
