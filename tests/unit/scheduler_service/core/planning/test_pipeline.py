"""Steps for a worker with pipeline stages: several share the decodes, and each brings the tokens that it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from blockyard.contract.sampling import BeamSearch
from tests.unit.scheduler_service.core.harness import Bench, configure, make_spec, rows

if TYPE_CHECKING:
    from scheduler_service.core.values import GroupSpec

NUM_ENGINES = 3


def bench_of(num_engines: int = NUM_ENGINES, **changes: object) -> Bench:
    return Bench(configure(num_virtual_engines=num_engines, max_steps_in_flight=num_engines, **changes))


def fill(bench: Bench) -> list[int]:
    """Sends what can be sent; how many rows each step has."""
    sent: list[int] = []
    while bench.scheduler.can_schedule() and (step := bench.schedule()) is not None:
        sent.append(len(step.sequence_ids))
    return sent


def decoding(bench: Bench, num_sequences: int, max_tokens: int = 40) -> None:
    """So many sequences that have their first token."""
    for number in range(num_sequences):
        bench.add(make_spec(f"r{number}", 3, max_tokens))
        bench.step()
    while bench.in_flight:
        bench.answer()


@pytest.mark.parametrize(("num_sequences", "shares"), [(6, [2, 2, 2]), (7, [3, 3, 1]), (2, [1, 1]), (1, [1])])
def test_steps_in_flight_share_the_decodes(num_sequences: int, shares: list[int]) -> None:
    bench = bench_of()
    decoding(bench, num_sequences)
    assert fill(bench) == shares
    assert len({sequence_id for step in bench.in_flight for sequence_id in step.sequence_ids}) == num_sequences
    # Each answer makes room for those that it sampled, and for nobody else.
    for _ in range(10):
        oldest = bench.in_flight[0]
        bench.answer()
        fill(bench)
        assert bench.in_flight[-1].sequence_ids == oldest.sequence_ids
    bench.run(NUM_ENGINES)
    bench.check_tokens()


def test_shares_grow_and_shrink_with_the_decodes() -> None:
    bench = bench_of()
    decoding(bench, 3)
    assert fill(bench) == [1, 1, 1]
    for number in range(3):
        bench.add(make_spec(f"late{number}", 3, 40))
    for _ in range(12):
        bench.answer()
        fill(bench)
    assert sorted(len(step.sequence_ids) for step in bench.in_flight) == [2, 2, 2]
    for number in range(3):
        bench.scheduler.abort(f"late{number}")
    for _ in range(12):
        bench.answer()
        fill(bench)
    assert sorted(len(step.sequence_ids) for step in bench.in_flight) == [1, 1, 1]
    bench.run(NUM_ENGINES)


def test_those_that_waited_longest_go_first() -> None:
    """With one step at a time the same ones would come again and again."""
    bench = bench_of()
    decoding(bench, 6)
    seen: list[tuple[int, ...]] = []
    for _ in range(6):
        seen.append(bench.send().sequence_ids)
        bench.answer()
    assert len({sequence_id for step in seen[:3] for sequence_id in step}) == 6
    assert seen[3:] == seen[:3]


def test_each_step_brings_the_tokens_that_it_computes() -> None:
    bench = bench_of()
    decoding(bench, 4)
    step = bench.send()
    brought = dict(step.input_ids)
    assert brought.keys() == set(step.sequence_ids)
    told = {sequence_id: bench.tokens[bench.names[sequence_id]][-1] for sequence_id in step.sequence_ids}
    assert brought == told


def test_the_pieces_of_a_prompt_are_in_flight_at_once() -> None:
    bench = bench_of(max_prefill_chunk=10)
    bench.add(make_spec("long", 35, 5))
    assert [rows(bench.send()) for _ in range(3)] == [{1: 10}] * 3
    bench.answer()
    assert rows(bench.send()) == {1: 5}
    # Its token is not known: nothing can be computed from it.
    assert bench.schedule() is None
    bench.run(NUM_ENGINES)
    bench.check_tokens()


def test_the_first_step_does_not_take_in_all_that_waits() -> None:
    bench = bench_of(max_num_seqs=12)
    for number in range(12):
        bench.add(make_spec(f"r{number}", 2, 5))
    assert fill(bench) == [4, 4, 4]
    bench.run(NUM_ENGINES)
    bench.check_tokens()


@pytest.mark.parametrize("num_decodes", [3, 4, 5, 6])
def test_one_that_waits_begins_beside_the_decodes(num_decodes: int) -> None:
    bench = bench_of(max_num_seqs=num_decodes + 1)
    decoding(bench, num_decodes)
    fill(bench)
    late = bench.add(make_spec("late", 2, 5))
    for _ in range(NUM_ENGINES):
        bench.answer()
        fill(bench)
    assert any(late in step.sequence_ids for step in bench.steps)
    bench.run(NUM_ENGINES)
    bench.check_tokens()


def test_after_a_stop_token_nothing_more_is_computed() -> None:
    bench = bench_of()
    free = run_freely(make_spec("r", 6, 20))
    bench.add(make_spec("r", 6, 20, stop={free[4]}))
    num_rows = 0
    while bench.scheduler.has_unfinished():
        fill(bench)
        num_rows += len(bench.in_flight[0].sequence_ids)
        bench.answer()
    # The prefill samples the first.
    assert num_rows == len(bench.tokens["r", 0]) == free.index(free[4]) + 1
    bench.run(NUM_ENGINES)
    bench.check_tokens()


def run_freely(spec: GroupSpec) -> list[int]:
    """The tokens of a request that runs alone."""
    bench = bench_of()
    bench.add(spec)
    bench.run(NUM_ENGINES)
    return bench.tokens[spec.request_id, 0]


@pytest.mark.parametrize("num_device_blocks", range(8, 17))
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_who_is_preempted_goes_on_with_its_tokens(mode: str, num_device_blocks: int) -> None:
    """Whoever gives way may have been chosen for the same step."""
    bench = bench_of(2, num_device_blocks=num_device_blocks, preemption_mode=mode)
    for number in range(6):
        bench.add(make_spec(f"r{number}", 3 + number % 3, 16, n=1 + number % 2))
    bench.run(2)
    assert bench.scheduler.stats().num_preemptions_total > 0
    bench.check_tokens()


def test_beams_and_others_share_steps() -> None:
    bench = bench_of()
    bench.add(make_spec("beams", 5, 9, n=2, beams=BeamSearch(3)))
    bench.add(make_spec("other", 5, 9, n=2))
    bench.run(NUM_ENGINES)
    for index in range(2):
        assert bench.tokens["other", index] == bench.generate_alone("other", index)
    assert not bench.failed
