"""A group of ranks: what they do together, for one epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.collectives import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockyard.contract.parallel import Parallel
    from kernels.collectives import Collectives
    from worker_service.collectives.lifetime import GroupLifetime


@dataclass(frozen=True, slots=True)
class RankGroup(Ranks):
    """The ranks of a replica. With a single stage, `world` and `stage` are the same collectives."""

    lifetime: GroupLifetime
    fingerprint: bytes = b""
    """The network's fingerprint, if a rank knew it before; see `DecoderModel.fingerprint`."""


def connect_group(
    connect: Callable[[str, int, int], Collectives], parallel: Parallel, lifetime: GroupLifetime
) -> RankGroup:
    """Makes a group. `connect` makes the collectives from a unique name, this rank's place, and the size."""
    world = connect("world", parallel.rank, parallel.world_size)
    if parallel.pipeline_parallel_size == 1:
        return RankGroup(world, world, lifetime)
    name = f"stage {parallel.pipeline_rank}"
    return RankGroup(world, connect(name, parallel.tensor_rank, parallel.tensor_parallel_size), lifetime)
