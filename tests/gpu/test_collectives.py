"""A group of one rank on the device, by NCCL on a GPU: what ranks do together is built of these operations.

With one rank the sums themselves are left out, and what two GPUs do is not seen here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from blockyard.contract.parallel import ALONE
from blockyard.errors import BlockyardError, Reason
from worker_service.collectives import nccl
from worker_service.collectives.group import GroupLifetime
from worker_service.collectives.process_group import join_gloo
from worker_service.groups.joining import GroupSettings, find_route

if TYPE_CHECKING:
    from worker_service.collectives.group import RankGroup

pytestmark = pytest.mark.gpu

SECONDS = 30.0


@pytest.fixture
def group(device: torch.device) -> RankGroup:
    """Connected as a worker does it that is started with `--collectives nccl`, or gloo on a processor."""
    kind = "nccl" if device.type == "cuda" else "gloo"
    route = find_route(GroupSettings(kind), device, "unix:/rank-0")
    if kind == "gloo":
        return join_gloo(c10d.HashStore(), ALONE, GroupLifetime(0), route.host, SECONDS)
    nccl.set_environment(route.host)
    return nccl.join_nccl(c10d.HashStore(), ALONE, GroupLifetime(0, nccl.abort_nccl), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_rows_come_back_as_they_are(group: RankGroup, dtype: torch.dtype, device: torch.device):
    world: Any = group.world
    rows = torch.arange(15, device=device).reshape(3, 5).to(dtype)
    with group.lifetime.work(SECONDS):
        assert torch.equal(world._all_gather(rows), rows[None])
        assert torch.equal(world._gather(rows, 0), rows[None])
        told = rows.clone()
        world._broadcast(told, 0)
    assert torch.equal(told, rows)
    assert not world.is_broken


def test_a_group_that_was_aborted_begins_nothing(group: RankGroup, device: torch.device):
    world: Any = group.world
    rows = torch.zeros(1, 1, device=device)
    world._all_gather(rows)
    world.abort("a test")
    with pytest.raises(BlockyardError) as caught:
        world._all_gather(rows)
    assert caught.value.reason is Reason.GROUP_BROKEN
    assert world.is_broken
