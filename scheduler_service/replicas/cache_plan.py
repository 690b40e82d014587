"""Plans the pools of a replica: from what fits at each worker, or like those of the workers that have some.

All ranks of a replica have the same numbers of blocks, since every step names the same blocks to all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.capacity.limits import DoesNotFit, KvBlocks, choose_max_model_len
from blockyard.contract.workers import AvailableBlocks, CacheInfo, CachePlan
from scheduler_service.replicas.epoch_failure import Misconfigured

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scheduler_service.config import SchedulerConfiguration

# The memory for blocks is measured, so a new process may find a little less.
MAX_SHORTAGE = 1 / 32


def plan_cache(
    configuration: SchedulerConfiguration, available: AvailableBlocks, model_max_model_len: int
) -> CachePlan:
    """Plans the pools and the model's length. Raises Misconfigured if the settings ask for too much."""
    cache, step = configuration.cache, configuration.scheduler
    drafts = configuration.draft_limits(available.num_state_blocks)
    kv_blocks = KvBlocks(
        available.block_size,
        available.kv_windows,
        step.max_num_batched_tokens,
        drafts.max_draft_tokens,
        available.num_state_blocks,
    )
    num_device_blocks = cache.num_device_blocks or available.num_device_blocks
    try:
        max_model_len = choose_max_model_len(
            step.max_model_len,
            model_max_model_len,
            num_device_blocks,
            available.block_size,
            kv_blocks,
        )
    except DoesNotFit as error:
        raise Misconfigured(str(error)) from None
    return CachePlan(
        block_size=available.block_size,
        num_device_blocks=num_device_blocks,
        num_host_blocks=cache.num_host_blocks if cache.num_host_blocks >= 0 else available.num_host_blocks,
        max_model_len=max_model_len,
        max_num_batched_tokens=step.max_num_batched_tokens,
        max_num_seqs=step.max_num_seqs,
        **drafts._asdict(),
        num_state_blocks=available.num_state_blocks,
    )


def find_least(available: Sequence[AvailableBlocks]) -> AvailableBlocks:
    """Returns what fits at each of several ranks. Raises Misconfigured if their blocks differ in size or KV groups."""
    if len({each.kv_windows for each in available}) > 1:
        raise Misconfigured("the ranks divide the layers into different KV groups: are they on devices of one kind?")
    sizes = [each.block_size for each in available]
    if len(set(sizes)) > 1:
        listed = ", ".join(map(str, sizes))
        raise Misconfigured(f"the ranks have blocks of {listed} tokens: choose one size with --block-size")
    return replace(
        available[0],
        num_device_blocks=min(each.num_device_blocks for each in available),
        num_host_blocks=min(each.num_host_blocks for each in available),
        # Stages of a pipeline may have other numbers of layers with a state.
        num_state_blocks=max(each.num_state_blocks for each in available),
    )


def plan_as(configuration: SchedulerConfiguration, cache: CacheInfo, available: AvailableBlocks) -> CachePlan:
    """Plans the same pools as the other ranks have. Raises Misconfigured if they do not fit."""
    asked = configuration.cache
    for name, is_free, fitting, there in (
        ("device", not asked.num_device_blocks, available.num_device_blocks, cache.num_device_blocks),
        ("host", asked.num_host_blocks < 0, available.num_host_blocks, cache.num_host_blocks),
    ):
        if is_free and fitting < there * (1 - MAX_SHORTAGE):
            raise Misconfigured(f"{fitting} {name} blocks fit, {there - fitting} fewer than the other ranks have")
    return CachePlan(
        block_size=cache.block_size,
        num_device_blocks=cache.num_device_blocks,
        num_host_blocks=cache.num_host_blocks,
        max_model_len=cache.max_model_len,
        max_num_batched_tokens=configuration.scheduler.max_num_batched_tokens,
        max_num_seqs=configuration.scheduler.max_num_seqs,
        **configuration.draft_limits(cache.num_state_blocks)._asdict(),
        num_state_blocks=cache.num_state_blocks,
    )
