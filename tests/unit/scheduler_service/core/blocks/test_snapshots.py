"""Snapshots: a prompt begins from the state that another one, or an earlier turn, had at the same tokens."""

from __future__ import annotations

import pytest

from blockyard.contract.sampling import BeamSearch
from scheduler_service.core.blocks.prefix_lookup import Prefix, name_of_state
from scheduler_service.core.values import BlockPair
from tests.unit.scheduler_service.core.harness import MEAN, Bench, configure, make_spec, rows

PROMPT = tuple((place * 7 + 3) % 32 for place in range(30))
EVERY = 8


def make_bench(**changes: object) -> Bench:
    """Blocks of 4 tokens, two fixed blocks for each sequence, and a snapshot at multiples of 8 tokens."""
    return Bench(configure(num_state_blocks=2, state_snapshot_tokens=EVERY, num_device_blocks=200, **changes))


def serve(bench: Bench, request_id: str, prompt: tuple[int, ...], max_tokens: int = 3, **others: object) -> int:
    """Serves a request alone. Returns how many tokens of its prompt were cached."""
    bench.add(make_spec(request_id, prompt, max_tokens, **others))
    bench.run()
    bench.check_tokens()
    bench.check_cached()
    return bench.prefilled.get(request_id, 0)


def test_a_prompt_begins_from_the_last_snapshot_of_the_same_prompt():
    bench = make_bench()
    assert serve(bench, "a", PROMPT) == 0
    assert serve(bench, "b", PROMPT) == 24


def test_the_piece_before_a_snapshot_ends_at_its_position():
    bench = make_bench()
    bench.add(make_spec("a", PROMPT, 3))
    first, second = bench.step(), bench.step()
    assert (rows(first), rows(second)) == ({1: 24}, {1: 6})
    (new,) = first.new_sequences
    assert [pair.source for pair in second.blocks_to_copy] == list(new.fixed_block_ids)


def test_what_begins_from_a_snapshot_copies_it_before_its_first_piece():
    bench = make_bench()
    serve(bench, "a", PROMPT)
    taken = next(step.blocks_to_copy for step in bench.steps if step.blocks_to_copy)
    bench.add(make_spec("b", PROMPT, 3))
    step = bench.step()
    (new,) = step.new_sequences
    assert new.num_computed_tokens == 24
    sources = [pair.destination for pair in taken]
    assert list(step.blocks_to_copy) == [BlockPair(*pair) for pair in zip(sources, new.fixed_block_ids, strict=True)]
    bench.run()
    bench.check_tokens()


def test_the_last_token_is_always_computed():
    """The state must be that before it."""
    bench = make_bench()
    assert serve(bench, "a", PROMPT[:24]) == 0
    assert serve(bench, "b", PROMPT[:24]) == 16
    # The first decode of the others began with all of their tokens.
    assert serve(bench, "c", PROMPT[:25]) == 24


def test_the_next_turn_of_a_chat_begins_from_the_answer():
    bench = make_bench()
    serve(bench, "a", PROMPT, 20)
    turn = PROMPT + tuple(bench.tokens["a", 0]) + (1, 2, 3)
    assert serve(bench, "b", turn) == 48


def test_of_an_answer_only_the_last_snapshot_is_kept():
    bench = make_bench()
    serve(bench, "a", PROMPT, 20)
    answer = tuple(bench.tokens["a", 0])
    # Another answer to the same prompt begins from the prompt's own.
    assert serve(bench, "b", (*PROMPT, *answer[:12], 31, 31, 31)) == 24


def test_where_prompts_part_a_snapshot_is_taken():
    """The second that begins alike takes it, since the blocks of tokens are cached up to there and no state is."""
    bench = make_bench()
    serve(bench, "a", PROMPT)
    assert serve(bench, "b", (*PROMPT[:21], *range(9))) == 0
    assert serve(bench, "c", (*PROMPT[:21], *range(20, 29))) == 16


def test_a_long_prompt_has_some_in_between():
    bench = make_bench()
    bench.add(make_spec("a", PROMPT, 3))
    (waiting,) = bench.scheduler._queues.waiting
    waiting.token_ids = [0] * 10_000
    snapshots = bench.scheduler._blocks.snapshots
    snapshots.plan(waiting, Prefix([], {}))
    assert waiting.snapshots == [4096, 8192, 9992, 10_000]
    snapshots.plan(waiting, Prefix([], {}, (), 4096, 6007))
    assert waiting.snapshots == [6000, 8192, 9992, 10_000]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_snapshot_of_which_a_block_is_gone_is_not_found(lost: int):
    bench = make_bench()
    serve(bench, "a", PROMPT)
    bench.add(make_spec("b", PROMPT, 3))
    (waiting,) = bench.scheduler._queues.waiting
    blocks = bench.scheduler._blocks
    blocks.device.forget(name_of_state(blocks._prefixes.hash_at(waiting, 24), lost))
    bench.run()
    bench.check_tokens()
    assert bench.prefilled["b"] == 0


def test_states_come_back_from_the_host():
    bench = make_bench(num_host_blocks=500)
    bench.times = (1.0, 1e-6)
    serve(bench, "a", PROMPT)
    device = bench.scheduler._blocks.device
    for number in range(12):
        serve(bench, f"other-{number}", tuple((number * 5 + place * place) % 31 for place in range(100)), 20)
    bench.add(make_spec("b", PROMPT, 3))
    step = bench.step()
    (new,) = step.new_sequences
    assert new.num_computed_tokens == 24
    assert {pair.destination for pair in step.blocks_to_swap_in} >= set(new.fixed_block_ids)
    bench.run()
    bench.check_tokens()
    assert device.num_free == device.num_usable


@pytest.mark.parametrize("length", range(24, 31))
def test_nothing_is_kept_of_what_was_not_computed(length: int):
    """A sequence ends with a token right before a position, while the step that would copy there is on its way."""
    truth = make_bench()
    serve(truth, "a", PROMPT[:length], 12)
    tokens = truth.tokens["a", 0]
    for place, stop in enumerate(tokens):
        if tokens.index(stop) == place:
            bench = make_bench(max_steps_in_flight=3)
            bench.add(make_spec("a", PROMPT[:length], 40, stop={stop}))
            bench.run(depth=3)
            bench.check_cached()


def test_no_block_is_taken_from_others():
    bench = make_bench(debug_integrity=False)
    device = bench.scheduler._blocks.device
    bench.add(make_spec("a", PROMPT, 3))
    bench.step()
    # Two blocks for the snapshot, and two that the sequence may need before they are free again.
    for _ in range(device.num_free - 3):
        device.allocate()
    assert not bench.send().blocks_to_copy


@pytest.mark.parametrize("windows", [(), (0,), (0, 6), (5,)])
@pytest.mark.parametrize("n", [1, 3])
def test_all_kinds_of_tables_have_them(windows: tuple[int, ...], n: int):
    bench = make_bench(kv_windows=windows)
    serve(bench, "a", PROMPT, 20, n=n)
    assert serve(bench, "b", PROMPT, n=n) == 24
    turn = PROMPT + tuple(bench.tokens["a", n - 1]) + (1, 2, 3)
    assert serve(bench, "c", turn) == 48


def test_children_are_not_copied_before_they_have_their_state():
    """They begin right where a snapshot is due, in the step in which they get it."""
    bench = make_bench()
    serve(bench, "a", PROMPT[:24], n=3)
    assert serve(bench, "b", PROMPT[:25]) == 24


def test_beams_have_them_too():
    bench = make_bench()
    serve(bench, "a", PROMPT, 20, beams=BeamSearch(3))
    assert serve(bench, "b", PROMPT, 20, beams=BeamSearch(3)) == 24


def test_a_preempted_sequence_begins_from_its_own():
    bench = make_bench(preemption_mode="recompute")
    first = bench.add(make_spec("a", PROMPT, 30))
    for _ in range(15):
        bench.step()
    preemption = bench.scheduler._planner.preemption
    preemption.take_last()
    step = bench.step()
    assert [new.num_computed_tokens for new in step.new_sequences] == [40]
    assert step.sequence_ids == (first,)
    bench.run()
    bench.check_tokens()


@pytest.mark.parametrize(
    ("first", "second"),
    [({"cache_salt": b"one"}, {"cache_salt": b"two"}), ({}, {"lora_id": 1}), ({}, {"pooling": MEAN, "max_tokens": 0})],
)
def test_others_do_not_begin_from_them(first: dict[str, object], second: dict[str, object]):
    bench = make_bench(max_loras=1)
    serve(bench, "a", PROMPT, **first)
    bench.add(make_spec("b", PROMPT, **{"max_tokens": 3} | second))
    assert [new.num_computed_tokens for new in bench.step().new_sequences] == [0]
    bench.run()


def test_a_reset_of_the_prefix_cache_forgets_them():
    bench = make_bench()
    serve(bench, "a", PROMPT)
    bench.scheduler.reset_prefix_cache()
    assert serve(bench, "b", PROMPT) == 0


@pytest.mark.parametrize("off", [{"state_snapshot_tokens": 0}, {"enable_prefix_caching": False}])
def test_they_can_be_turned_off(off: dict[str, object]):
    bench = Bench(configure(**{"num_state_blocks": 2, "state_snapshot_tokens": EVERY} | off))
    serve(bench, "a", PROMPT)
    assert not any(step.blocks_to_copy for step in bench.steps)
    assert serve(bench, "b", PROMPT) == 0


def test_their_distance_is_in_whole_blocks():
    config = configure(num_state_blocks=2, block_size=3, state_snapshot_tokens=8)
    assert config.snapshot_distance == 9
    assert configure(state_snapshot_tokens=8).snapshot_distance == 0
