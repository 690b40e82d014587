"""A group of ranks: what they do together, for one epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.collectives import Collectives
    from worker_service.collectives.lifetime import GroupLifetime
    from worker_service.parallel import Parallel


@dataclass(frozen=True, slots=True)
class Group:
    """The collectives of all ranks, and of those that share this rank's layers: the same where there is one stage."""

    lifetime: GroupLifetime
    world: Collectives
    stage: Collectives
    fingerprint: bytes = b""
    """What the network computes, as far as a rank knew before; see `DecoderModel.fingerprint`."""


def connect_group(
    connect: Callable[[str, int, int], Collectives], parallel: Parallel, lifetime: GroupLifetime
) -> Group:
    """Makes a group of what `connect` makes: given a name that no other has, this rank's place, and the size."""
    world = connect("world", parallel.rank, parallel.world_size)
    if parallel.pipeline_parallel_size == 1:
        return Group(lifetime, world, world)
    name = f"stage {parallel.pipeline_rank}"
    return Group(lifetime, world, connect(name, parallel.tensor_rank, parallel.tensor_parallel_size))
