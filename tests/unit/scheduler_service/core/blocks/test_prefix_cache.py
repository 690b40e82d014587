"""Blocks that are found by their content: when, how deep, how long, and never by accident."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core.blocks.prefix_lookup import hash_block, root_hash
from tests.unit.scheduler_service.core.harness import LAST, Bench, configure, make_spec

PROMPT = tuple(range(3, 15))  # three blocks


def finish(bench: Bench, request_id: str = "first", prompt: tuple[int, ...] = PROMPT) -> None:
    bench.add(make_spec(request_id, prompt, 1))
    bench.run()


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4), min_size=1, max_size=3))
def test_names_are_a_chain_of_sha256(blocks: list[list[int]]) -> None:
    name, expected = b"", b""
    for block in blocks:
        name = hash_block(name, block)
        expected = hashlib.sha256(expected + b"".join(token.to_bytes(4, "little") for token in block)).digest()
    assert name == expected
    assert hash_block(name, blocks[0]) != hash_block(b"", blocks[0])
    assert hash_block(b"", blocks[0], b"tenant") != hash_block(b"", blocks[0])


def test_a_shared_beginning_is_computed_once() -> None:
    bench = Bench()
    finish(bench)
    bench.add(make_spec("second", (*PROMPT[:8], 1, 2, 3), 3))
    step = bench.send()
    assert step.new_sequences[0].num_computed_tokens == 8
    assert step.num_new_tokens == (3,)
    assert step.new_sequences[0].block_ids[:2] == bench.steps[0].new_sequences[0].block_ids[:2]
    bench.run()
    bench.check_tokens()
    assert bench.prefilled == {"first": 0, "second": 8}
    assert bench.scheduler.stats().num_cached_tokens_total == 8


def test_only_full_blocks_and_only_from_the_beginning() -> None:
    bench = Bench()
    finish(bench)
    for number, prompt in enumerate([PROMPT[:3], PROMPT[1:], (*PROMPT[:4], 0, *PROMPT[5:])]):
        finish(bench, f"r{number}", prompt)
    assert [bench.prefilled[f"r{number}"] for number in range(3)] == [0, 0, 4]


def test_output_is_found_too() -> None:
    bench = Bench()
    bench.add(make_spec("first", PROMPT, 9))
    bench.run()
    finish(bench, "second", PROMPT + tuple(bench.tokens["first", 0]))
    assert bench.prefilled["second"] == 20  # 21 tokens, of which the last has no KV


def test_what_is_not_answered_is_not_found() -> None:
    bench = Bench()
    bench.add(make_spec("first", PROMPT, 5))
    bench.send()
    bench.add(make_spec("second", PROMPT, 5))
    assert bench.send().new_sequences[0].num_computed_tokens == 0
    bench.answer()
    bench.add(make_spec("third", PROMPT, 5))
    assert bench.send().new_sequences[0].num_computed_tokens == 11
    bench.run()
    bench.check_tokens()


def test_two_alike_in_one_step_both_compute() -> None:
    bench = Bench()
    bench.add(make_spec("first", PROMPT))
    bench.add(make_spec("second", PROMPT))
    step = bench.send()
    assert [new.num_computed_tokens for new in step.new_sequences] == [0, 0]
    assert not set(step.new_sequences[0].block_ids) & set(step.new_sequences[1].block_ids)
    bench.run()
    bench.check_tokens()


def test_what_was_aborted_in_flight_is_not_found() -> None:
    bench = Bench()
    bench.add(make_spec("first", PROMPT))
    bench.send()
    bench.scheduler.abort("first")
    bench.add(make_spec("second", PROMPT))
    bench.send()
    bench.run()
    assert bench.prefilled == {"second": 0}


def test_a_fully_cached_prompt_computes_its_last_token_in_a_copy() -> None:
    bench = Bench()
    finish(bench)
    source = bench.steps[0].new_sequences[0].block_ids[2]
    bench.add(make_spec("second", PROMPT, 5))
    bench.add(make_spec("third", PROMPT, 5))
    step = bench.send()
    assert step.num_new_tokens == (1, 1)
    assert [new.num_computed_tokens for new in step.new_sequences] == [11, 11]
    assert [pair.source for pair in step.blocks_to_copy] == [source, source]
    assert [new.block_ids[2] for new in step.new_sequences] == [pair.destination for pair in step.blocks_to_copy]
    bench.run()
    bench.check_tokens()


def test_a_fully_cached_group_forks_too() -> None:
    bench = Bench()
    finish(bench)
    bench.add(make_spec("second", PROMPT, 5, n=3))
    assert bench.send().sequence_ids == ()
    assert bench.send().num_new_tokens == (1, 0, 0)
    bench.run()
    bench.check_tokens()


def test_a_fully_cached_prompt_that_fills_the_pool_needs_no_block_more() -> None:
    bench = Bench(configure(num_device_blocks=4))
    finish(bench)
    bench.add(make_spec("second", PROMPT, 1))
    step = bench.send()
    assert step.new_sequences[0].num_computed_tokens == 8
    assert not step.blocks_to_copy
    bench.run()
    bench.check_tokens()


def test_eviction_takes_the_end_of_a_chain_first() -> None:
    bench = Bench(configure(num_device_blocks=8, num_host_blocks=0))
    finish(bench)  # 3 of 7 blocks
    finish(bench, "filler", (*range(20, 32), *range(7)))  # 5 blocks: one of them is evicted
    finish(bench, "second")
    assert bench.prefilled["second"] == 8


def test_the_least_recently_used_chain_goes_first() -> None:
    bench = Bench(configure(num_device_blocks=8, num_host_blocks=0))
    old, new = (1,) * 8, (2,) * 8
    finish(bench, "old", old)
    finish(bench, "new", new)
    finish(bench, "old again", old)
    finish(bench, "filler", tuple(range(3, 23)))  # five blocks: three unused, two evicted
    finish(bench, "old once more", old)
    finish(bench, "new again", new)
    assert bench.prefilled["old once more"] == 7
    assert bench.prefilled["new again"] == 0


def test_a_twin_counts_as_a_use() -> None:
    """The head of a chain may be another's block: it must not be evicted before the deeper blocks."""
    bench = Bench()
    bench.add(make_spec("a", PROMPT[:4], 1))
    bench.add(make_spec("b", PROMPT, 1))
    bench.run()
    device = bench.scheduler._blocks.device
    names = [hash_block(b"", PROMPT[:4])]
    names.append(hash_block(names[0], PROMPT[4:8]))
    names.append(hash_block(names[1], PROMPT[8:]))
    order = list(device._evictable)
    assert [order.index(device.find(name)) for name in names] == [2, 1, 0]  # type: ignore[arg-type]


def test_a_twin_takes_the_place_of_one_that_was_evicted() -> None:
    """Else what comes after it in the chain could never be found again."""
    bench = Bench(configure(num_device_blocks=14))
    bench.add(make_spec("a", PROMPT[:4], 1))
    bench.add(make_spec("b", PROMPT, 20))
    bench.step()
    finish_one = make_spec("filler", (31,) * 24, 1)
    bench.add(finish_one)
    while ("filler", 0) not in bench.finished:
        bench.step()
    for _ in range(14):
        bench.step()
    assert bench.scheduler._blocks.device.find(hash_block(b"", PROMPT[:4])) is None
    bench.run()
    finish(bench, "c")
    assert bench.prefilled["c"] == 11


def test_without_caching_nothing_is_found() -> None:
    bench = Bench(configure(enable_prefix_caching=False))
    finish(bench)
    finish(bench, "second")
    assert bench.prefilled == {"first": 0, "second": 0}
    assert bench.scheduler.stats().num_cached_device_blocks == 0


def test_a_refused_admission_remembers_no_hits() -> None:
    """What was found when it was refused may be evicted when it is admitted."""
    bench = Bench(configure(num_device_blocks=9, num_host_blocks=0))
    finish(bench)
    bench.add(make_spec("runs", 17, 12))  # five blocks of eight
    bench.step()
    bench.add(make_spec("waits", (*PROMPT, 1, 2, 3, 4, 5), 2))
    bench.step()
    assert bench.scheduler.stats().num_waiting == 1
    bench.run()
    bench.check_tokens()
    assert bench.prefilled["waits"] < 12


def test_a_reset_forgets_what_has_ended() -> None:
    bench = Bench()
    finish(bench)
    reset = bench.scheduler.reset_prefix_cache()
    assert (reset.num_forgotten_device_blocks, reset.num_kept_device_blocks) == (3, 0)
    finish(bench, "second")
    assert bench.prefilled["second"] == 0
    bench.check_tokens()


def test_a_reset_leaves_what_runs_and_its_names() -> None:
    bench = Bench()
    bench.add(make_spec("first", PROMPT, 20))
    bench.send()
    bench.answer()
    reset = bench.scheduler.reset_prefix_cache()
    assert (reset.num_forgotten_device_blocks, reset.num_kept_device_blocks) == (0, 3)
    bench.add(make_spec("second", (*PROMPT, 1), 3))
    bench.run()
    assert bench.prefilled["second"] == 12
    bench.check_tokens()


# Salts.


def test_requests_share_blocks_only_with_those_of_their_salt() -> None:
    bench = Bench()
    for name, salt in (("first", b"one"), ("other", b"two"), ("none", b""), ("same", b"one"), ("again", b"")):
        bench.add(make_spec(name, PROMPT, 9, cache_salt=salt))
        bench.run()
    assert bench.prefilled == {"first": 0, "other": 0, "none": 0, "same": 11, "again": 11}
    # What is found of an answer has its request's salt too.
    longer = PROMPT + tuple(bench.tokens["first", 0])
    for name, salt in (("longer", b"one"), ("longer other", b"three")):
        bench.add(make_spec(name, longer, 1, cache_salt=salt))
        bench.run()
    assert (bench.prefilled["longer"], bench.prefilled["longer other"]) == (20, 0)
    bench.check_tokens()
    bench.check_cached()


def test_a_salt_is_no_beginning_of_a_prompt() -> None:
    """Nobody may choose a salt with which a prompt looks like what stands behind another prompt's beginning."""
    head = PROMPT[:4]
    content = b"".join(token.to_bytes(4, "little") for token in head)
    for salt in (content, hash_block(b"", head), root_hash(b"one")):
        assert hash_block(root_hash(salt), PROMPT[4:8]) != hash_block(hash_block(b"", head), PROMPT[4:8])
        assert len(root_hash(salt)) == 32
    assert root_hash(b"") == b""


def test_a_pooled_prompt_that_is_cached_whole_waits_for_a_block_to_copy_into() -> None:
    """It needs no more blocks than it finds but one, and it is not alone."""
    bench = Bench(configure(num_device_blocks=3))
    bench.add(make_spec("a", PROMPT[:4], 4))
    bench.step()
    assert bench.step().appended_block_ids
    assert not bench.scheduler.stats().num_free_device_blocks
    bench.add(make_spec("b", PROMPT[:4], 0, pooling=LAST))
    bench.run()
    bench.check_tokens()
