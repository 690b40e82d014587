"""Layers with a window: what they hold and give back, and what of it is found again."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from blockyard.capacity.limits import KvBlocks
from scheduler_service.core.config import KvBlockGroups
from scheduler_service.core.scheduler import NeverFits
from scheduler_service.core.sequence import Group
from tests.unit.scheduler_service.core.harness import Bench, configure, make_spec

# One group keeps everything, two the last 6 tokens: blocks of 4 tokens.
WINDOWS = (0, 6, 6)
PROMPT = tuple(place * place % 31 for place in range(40))


def make_bench(**changes: Any) -> Bench:
    changes = {"kv_windows": WINDOWS, "max_num_batched_tokens": 8, "max_steps_in_flight": 2, **changes}
    return Bench(configure(**{"num_device_blocks": 100, **changes}))


def count_held(bench: Bench) -> int:
    stats = bench.scheduler.stats()
    return stats.num_device_blocks - stats.num_free_device_blocks


def test_a_sequence_that_decodes_holds_what_its_queries_see() -> None:
    bench = make_bench()
    bench.add(make_spec("a", PROMPT, 60))
    for _ in range(30):
        bench.step()
    (sequence,) = bench.scheduler._queues.running
    length = sequence.num_scheduled
    assert length > 60
    num_blocks, num_seen = -(-length // 4), -(-6 // 4) + 1
    assert num_blocks + 2 * num_seen <= count_held(bench) <= num_blocks + 2 * (num_seen + 1)
    bench.run()
    bench.check_tokens()


def test_a_prefill_goes_on_with_what_it_gives_back() -> None:
    """In a pool that does not hold the blocks of the prompt in all groups."""
    bench = make_bench(num_device_blocks=1 + 11 + 2 * 9, max_prefill_chunk=4, max_num_batched_tokens=4)
    bench.add(make_spec("a", PROMPT, 4))
    assert bench.scheduler.stats().num_device_blocks < 3 * 10
    bench.run()
    bench.check_tokens()
    assert bench.scheduler.stats().num_preemptions_total == 0
    assert bench.scheduler.stats().num_given_back_blocks_total >= 2 * 8


def test_steps_in_flight_still_see_what_they_see() -> None:
    """A block is given back with the answer and not when the query behind it is sent."""
    bench = make_bench(max_num_batched_tokens=16)
    bench.add(make_spec("a", PROMPT, 4))
    bench.send()
    bench.send()
    assert bench.scheduler.stats().num_given_back_blocks_total == 0
    bench.answer()
    assert bench.scheduler.stats().num_given_back_blocks_total == 2 * ((16 - 6 + 1) // 4)
    bench.run()
    bench.check_tokens()


def test_what_was_given_back_is_found() -> None:
    bench = make_bench()
    bench.add(make_spec("a", PROMPT, 30))
    bench.run()
    bench.add(make_spec("b", (*PROMPT[:17], 30, 29, 28), 3))
    bench.run()
    assert bench.prefilled == {"a": 0, "b": 16}
    bench.check_tokens()


def test_a_hit_needs_all_groups_but_of_windows_no_more_than_they_see() -> None:
    bench = make_bench()
    bench.add(make_spec("a", PROMPT, 1))
    bench.run()
    device = bench.scheduler._blocks.device
    # Of the last group blocks are evicted: those behind the window, then some that it needs, where those before them
    # are of use down to the gap.
    for index, found in ((0, 36), (5, 36), (8, 32), (7, 20)):
        block_hash = bench_hash(bench, index)
        block = device._block_of_hash.pop(block_hash + bytes((2,)))
        del device._hash_of_block[block]
        del device._evictable[block]
        device._unused.append(block)
        bench.scheduler.check_integrity()
        name = f"after {index}"
        bench.add(make_spec(name, (*PROMPT[:39], 30, 30), 1))
        step = bench.send()
        assert step.new_sequences[0].num_computed_tokens == found, name
        bench.scheduler.abort(name)
        bench.run()


def bench_hash(bench: Bench, index: int) -> bytes:
    """The content of one of the prompt's blocks in the first group."""
    sequence = Group(make_spec("other", PROMPT, 1), 1, 41, 0.0).sequences[0]
    return bench.scheduler._blocks._prefixes.hash(sequence, index * len(WINDOWS))


def test_what_can_never_fit_is_told_by_groups() -> None:
    config = configure(kv_windows=WINDOWS, num_device_blocks=100, max_num_batched_tokens=8, max_model_len=4000)
    num_ahead = config.kv_groups.num_ahead
    assert config.max_tokens == (99 - 2 * num_ahead) * 4 + 1
    bench = Bench(config)
    with pytest.raises(NeverFits):
        bench.add(make_spec("a", 20, config.max_tokens - 19))
    bench.add(make_spec("b", 20, config.max_tokens - 20))


def test_all_layers_may_have_a_window() -> None:
    """Then no sequence is too long for the blocks."""
    bench = make_bench(kv_windows=(5,), num_device_blocks=12, max_num_batched_tokens=4, max_model_len=150)
    assert bench.config.max_tokens == 150
    bench.add(make_spec("a", PROMPT, 110))
    bench.run()
    bench.check_tokens()
    assert bench.scheduler.stats().num_preemptions_total == 0


def test_a_plan_counts_blocks_as_the_core_does() -> None:
    for windows, num_blocks, num_tokens, num_drafts in product(
        ((0,), (0, 6, 6), (64, 0), (100,), (8, 0, 0, 16)), (1, 7, 50, 300, 5000), (8, 64), (0, 1, 11)
    ):
        config = configure(
            kv_windows=windows,
            num_device_blocks=num_blocks + 1,
            max_num_batched_tokens=num_tokens,
            max_steps_in_flight=3,
            max_draft_tokens=num_drafts,
        )
        planned = KvBlocks(config.block_size, windows, num_tokens, num_drafts)
        assert planned.count_tokens(num_blocks) == config.kv_groups.count_tokens(num_blocks)
        for length in (1, 30, 500, 3000):
            assert planned.count_blocks(length) <= config.kv_groups.count_blocks(length)


def test_so_many_tokens_are_held_by_so_many_blocks() -> None:
    for windows, num_blocks in product(((0,), (0, 6, 6), (0, 0, 9)), range(1, 200)):
        groups = KvBlockGroups(4, windows, 5 if max(windows) else 0)
        num_tokens = groups.count_tokens(num_blocks)
        assert num_tokens is not None
        assert groups.count_blocks(num_tokens) <= num_blocks < groups.count_blocks(num_tokens + 1)
