"""Ranks of a group as threads of this process, over each transport."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from torch._C import _distributed_c10d as c10d

from blockyard.contract.parallel import Parallel
from tests.kit.kernels.thread_collectives import ThreadMeeting
from worker_service.collectives.group import GroupLifetime
from worker_service.collectives.process_group import join_gloo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker_service.collectives.group import RankGroup

T = TypeVar("T")
JOIN_SECONDS = 20.0


def all_ranks(work: Callable[[Any], T], ranks: Sequence[Any]) -> list[T]:
    """Does some work at every rank at once, and gives what each returned."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks))


def gloo_groups(tensor: int, pipeline: int = 1) -> list[RankGroup]:
    """Groups over loopback, by rank."""
    store = c10d.HashStore()

    def join(rank: int) -> RankGroup:
        parallel = Parallel(tensor, pipeline, rank)
        return join_gloo(store, parallel, GroupLifetime(rank), "127.0.0.1", JOIN_SECONDS)

    return all_ranks(join, range(tensor * pipeline))


def make_collectives(transport: str, size: int) -> list[Any]:
    """The collectives of each rank."""
    if transport == "gloo":
        return [group.world for group in gloo_groups(size)]
    return list(ThreadMeeting(size).make_collectives())


def begun(work: Callable[[], object]) -> threading.Thread:
    """Some work in a thread of its own."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
