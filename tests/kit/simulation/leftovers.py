"""Finds what is left in a cluster in which nothing runs: requests, sequences, blocks, handles, readers and rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kit.simulation.cluster import Cluster


def find_leftovers(cluster: Cluster) -> str:
    """Names the first thing that is left; empty: nothing is."""
    return next(_find_all(cluster), "")


def _find_all(cluster: Cluster) -> Iterator[str]:
    scheduler = cluster.nodes["scheduler"]
    if scheduler.service is None:
        yield "the scheduler does not run"
        return
    yield from _find_at_scheduler(scheduler.service.service)
    for name, node in cluster.nodes.items():
        if name.startswith("gateway") and node.service is not None:
            yield from (f"{left} at {name}" for left in _find_at_gateway(node.service.generation))
        if name.startswith("worker") and node.service is not None and node.service.model is not None:
            yield from (f"row {sequence_id} at {name}" for sequence_id in node.service.model.rows)


def _find_at_scheduler(service: Any) -> Iterator[str]:
    if held := len(service.backlog) + len(service.requests.live):
        yield f"{held} requests at the scheduler"
    for number, stats in enumerate(service.stats()):
        if stats.num_waiting + stats.num_running + stats.num_swapped + stats.num_steps_in_flight:
            yield f"sequences at replica {number}"
        if stats.num_free_device_blocks != stats.num_device_blocks:
            yield f"{stats.num_device_blocks - stats.num_free_device_blocks} blocks of replica {number}"
        if stats.num_free_host_blocks != stats.num_host_blocks:
            yield f"host blocks of replica {number}"
    for outbox in service.requests.outboxes:
        yield from (f"handle {handle} of {outbox.owner} at the scheduler" for handle in outbox.request_ids)


def _find_at_gateway(generation: Any) -> Iterator[str]:
    if generation.num_requests:
        yield f"{generation.num_requests} requests"
    for model in generation.served_models:
        live, outstanding = model.live, model.live._outstanding
        if live.num_readers:
            yield f"{live.num_readers} readers"
        yield from (f"handle {handle}" for handle in outstanding._by_handle)
        yield from (f"look-up of {wire_id}" for wire_id in outstanding._lookups)
        yield from (f"route of sequence {sequence_id}" for sequence_id in outstanding._routes._routes)
