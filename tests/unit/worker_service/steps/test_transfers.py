"""Swaps and copies move whole blocks, bit for bit, with no sequence scheduled: vLLM's tests/worker/test_swap.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from blockyard.errors import Reason
from tests.unit.worker_service.driver import WorkerDriver, fails, pairs, running_worker

if TYPE_CHECKING:
    from pathlib import Path


def fill(worker: WorkerDriver) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes in both pools; gives what is in them."""
    executor = worker.server.worker.set_up.executor
    assert executor is not None
    generator = torch.Generator().manual_seed(0)
    for pool in (executor.cache.device_pool, executor.cache.host_pool):
        pool.copy_(torch.randn(pool.shape, generator=generator))
    return executor.cache.device_pool, executor.cache.host_pool


async def test_every_block_of_every_layer_arrives(worker: WorkerDriver) -> None:
    device_pool, host_pool = fill(worker)
    before_device, before_host = device_pool.clone(), host_pool.clone()
    steps = worker.open(1)
    out = [(7, 0), (8, 1), (9, 2), (3, 9)]
    before, _ = await worker.checksums(device=[source for source, _ in out])
    response = await steps.step(blocks_to_swap_out=pairs(*out))
    assert not response.sequence_ids
    _, after = await worker.checksums(host=[destination for _, destination in out])
    assert after == before
    assert len(after) == len(out) * 2  # one for each layer
    assert len(set(after)) == len(after)
    for source, destination in out:
        assert torch.equal(host_pool[destination], before_device[source])
    assert torch.equal(device_pool, before_device)
    back = [(9, 20), (0, 7), (2, 8), (5, 1)]
    _, before = await worker.checksums(host=[source for source, _ in back])
    await steps.step(blocks_to_swap_in=pairs(*back))
    after, _ = await worker.checksums(device=[destination for _, destination in back])
    assert after == before
    assert torch.equal(device_pool[20], before_device[3])
    assert torch.equal(device_pool[1], before_host[5])


async def test_one_step_swaps_out_then_in_then_copies(worker: WorkerDriver) -> None:
    device_pool, host_pool = fill(worker)
    before_device, before_host = device_pool.clone(), host_pool.clone()
    steps = worker.open(1)
    await steps.step(
        blocks_to_swap_out=pairs((1, 0), (2, 1)),
        blocks_to_swap_in=pairs((5, 1), (6, 2)),
        blocks_to_copy=pairs((1, 10), (1, 11), (3, 12)),
    )
    for pool, block, source in [
        (host_pool, 0, before_device[1]),
        (host_pool, 1, before_device[2]),
        (device_pool, 1, before_host[5]),
        (device_pool, 2, before_host[6]),
        (device_pool, 10, before_host[5]),
        (device_pool, 11, before_host[5]),
        (device_pool, 12, before_device[3]),
    ]:
        assert torch.equal(pool[block], source)


async def test_a_refused_step_moves_nothing(worker: WorkerDriver) -> None:
    device_pool, host_pool = fill(worker)
    before_device, before_host = device_pool.clone(), host_pool.clone()
    steps = worker.open(1)
    error = await steps.refused(
        blocks_to_swap_out=pairs((1, 0)), blocks_to_swap_in=pairs((0, 5)), blocks_to_copy=pairs((3, 4))
    )
    assert error.reason is Reason.FIELD_INVALID
    assert torch.equal(device_pool, before_device)
    assert torch.equal(host_pool, before_host)


async def test_checksums_check_their_blocks(worker: WorkerDriver) -> None:
    error = await fails(worker.checksums(device=[65], host=[16]))
    assert {violation.field for violation in error.violations} == {"device_block_ids", "host_block_ids"}


async def test_checksums_are_off_unless_enabled(socket_folder: Path) -> None:
    async with running_worker(socket_folder, enable_debug_rpcs=False) as worker:
        assert (await fails(worker.checksums(device=[1]))).reason is Reason.FEATURE_DISABLED
