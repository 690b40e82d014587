"""Swaps on the device's own streams beside its compute, and the host's memory that they go to."""

from __future__ import annotations

import pytest
import torch

from blockyard_kernels.arena import LastingArena
from blockyard_kernels.cuda.swap import SwapStreams, make_streams
from blockyard_kernels.ops import kv_pool_shape
from tests.kit.kernels.late_streams import lazy_swaps
from tests.kit.kernels.swap_traces import Pools, make_trace, run_in_order
from worker_service.cache_engine import BlockFormat, allocate_host_pool
from worker_service.device.registered import allocate_registered

pytestmark = pytest.mark.gpu

# On a GPU a block takes longer to move than a step takes to compute, so that a wait that is missing shows.
GPU_WIDTH = 1 << 15
FORMAT = BlockFormat(2, 2, 16, 64, torch.bfloat16)


@pytest.mark.parametrize("seed", range(4))
def test_swaps_beside_compute_give_what_the_order_gives(device: torch.device, seed: int) -> None:
    on_gpu = device.type == "cuda"
    trace = make_trace(seed)
    pools = Pools(device, GPU_WIDTH if on_gpu else 3)
    if on_gpu:
        numbers = pools.host
        pools.host = allocate_registered(numbers.nbytes, device).view(torch.int64).view(numbers.shape)
        pools.host.copy_(numbers)
    swaps = SwapStreams(pools.device, pools.host, make_streams(pools.device) if on_gpu else lazy_swaps())
    for step in trace:
        swaps.transfer(*step.transfers(), step.rows)
        pools.compute(step.rows)
    swaps.synchronize()
    assert pools.all() == run_in_order(trace)


def test_a_host_pool_is_reached_by_the_device_until_it_is_freed(device: torch.device) -> None:
    """Workers that run one after another in a process may get the same addresses."""
    for _ in range(3):
        pool = allocate_host_pool(FORMAT, 5, device, LastingArena(torch.device("cpu")))
        assert pool.shape == kv_pool_shape(5, 2, 2, 16, 64)
        assert pool.is_pinned() == (device.type == "cuda")
        assert not pool.any()
        pool.fill_(1)
        copy = pool.to(device, non_blocking=True)
        del pool
        assert bool((copy == 1).all())
