"""Drafts change when tokens come, and never which: random traces with a worker that drafts as it likes.

BLOCKYARD_TEST_WHOLE plays 2,000 traces of some 47 steps each, BLOCKYARD_TEST_TRACES so many. A million steps:

    BLOCKYARD_TEST_TRACES=21300 pytest --timeout=0 -k drafts_change_no_token <this file>
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.contract.sampling import BeamSearch, FinishReason, PredictionUsage
from scheduler_service.core.config import CoreConfig, KvBlockGroups, StepMismatch
from scheduler_service.core.planning import answers
from scheduler_service.core.scheduler import NeverFits
from scheduler_service.core.sequence import Group
from scheduler_service.core.step import StepBuilder
from scheduler_service.core.values import DraftCounts, Sources, StepResult
from tests.kit.oracles.hostile_drafter import HostileDrafter
from tests.unit.scheduler_service.core.harness import LAST, VOCAB_SIZE, Bench, configure, make_spec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from scheduler_service.core.sequence import Sequence
    from scheduler_service.core.values import SchedulerOutput

NUM_TRACES = int(os.environ.get("BLOCKYARD_TEST_TRACES") or (2000 if os.environ.get("BLOCKYARD_TEST_WHOLE") else 120))
PREFIX = tuple((place * 5 + 3) % VOCAB_SIZE for place in range(24))
WINDOWS = [(0, 3), (0, 5, 5), (4,), (2, 0), (0, 3, 7), (1,), (6, 0, 0)]


def draw_config(draw: Random, *, has_windows: bool) -> CoreConfig:
    return configure(
        block_size=draw.choice([1, 2, 3, 4]),
        num_device_blocks=draw.randint(4, 14) * (draw.randint(1, 4) if has_windows else 1),
        num_host_blocks=draw.choice([0, 2, 5, 20]),
        max_model_len=draw.choice([8, 20, 40, 80]),
        max_num_seqs=draw.randint(1, 6),
        max_num_batched_tokens=draw.choice([1, 3, 6, 16, 32]),
        max_prefill_chunk=draw.choice([0, 0, 2, 3]),
        enable_prefix_caching=draw.random() < 0.75,
        preemption_mode=draw.choice(["auto", "swap", "recompute"]),
        max_steps_in_flight=draw.choice([1, 2, 2, 3]),
        watermark=draw.choice([0.0, 0.1, 0.2]),
        policy=draw.choice(["fcfs", "priority"]),
        aging_seconds=draw.choice([0.0, 1.0, 5.0, 1e9]),
        victims=draw.choice(["last", "auto"]),
        enable_host_prefix_cache=draw.random() < 0.66,
        max_loras=draw.choice([0, 1, 2]),
        kv_windows=draw.choice(WINDOWS) if has_windows else (0,),
        max_draft_tokens=draw.choice([1, 2, 4, 7]),
        max_draft_rows=draw.choice([1, 4, 16]),
        prices_drafts=draw.random() < 0.25,
    )


class Trace:
    """Requests, aborts, deaths of the worker, steps and answers in any order: a function of the seed."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)
        self.bench = Bench(draw_config(self.draw, has_windows=seed % 3 == 0))
        self.aborted: set[tuple[str, int]] = set()
        self.counts = Counter[str]()
        self.now = 0.0

    def play(self) -> Counter[str]:
        bench, draw = self.bench, self.draw
        for _ in range(draw.randint(20, 80)):
            self.act()
            if draw.random() < 0.1:
                bench.times = (draw.choice([0.0, 1e-5, 1e-3]), draw.choice([0.0, 1e-5, 1e-1]))
            if not bench.in_flight:
                bench.check_cached()
        bench.run(bench.config.max_steps_in_flight)
        bench.check_tokens()
        for name, tokens in bench.tokens.items():
            assert name in bench.finished or name in self.aborted, name
            assert tokens == bench.generate_alone(*name)[: len(tokens)], name
        stats = bench.scheduler.stats()
        self.counts += Counter(
            steps=len(bench.steps),
            preemptions=stats.num_preemptions_total,
            swaps=stats.num_swaps_total,
            drafts=stats.num_draft_tokens_total,
            accepted=stats.num_accepted_tokens_total,
        )
        return self.counts

    def act(self) -> None:
        bench, draw = self.bench, self.draw
        action = draw.random()
        if action < 0.3 or not bench.specs:
            self.add()
        elif action < 0.36:
            request_id, index = draw.choice(sorted(bench.specs)), draw.choice([None, 0, 1])
            reason, num_tokens = draw.choice(list(FinishReason)), draw.choice([None, None, 1])
            bench.scheduler.abort(request_id, index, reason, num_tokens)
            self.aborted |= {(request_id, each) for each in range(3)}
        elif action < 0.38:
            bench.lose_worker()
            self.counts["deaths"] += 1
        elif action < 0.6:
            bench.now = self.now
            bench.schedule()
        elif action < 0.75:
            self.answer()
        else:
            for _ in range(draw.randint(1, 12)):
                self.now += 0.5
                bench.now = self.now
                while bench.scheduler.can_schedule() and bench.schedule() is not None:
                    pass
                self.answer()

    def answer(self) -> None:
        if self.bench.in_flight:
            self.bench.answer()

    def add(self) -> None:
        draw = self.draw
        self.now += 1
        tail = tuple(draw.randint(0, 3) for _ in range(draw.randint(0, 4)))
        beams, is_pooled = draw.choice([None] * 6 + [BeamSearch(2), BeamSearch(3)]), draw.random() < 0.05
        others: dict[str, Any] = {"beams": beams, "n": draw.choice([1, 1, 1, 2, 3])}
        spec = make_spec(
            f"r{len(self.bench.specs)}x{self.now}",
            PREFIX[: draw.randint(0, 16)] + tail or (1,),
            0 if is_pooled else draw.randint(1, 20),
            min_tokens=draw.randint(0, 3),
            stop=frozenset(draw.sample(range(VOCAB_SIZE), draw.choice([0, 0, 2, 6]))),
            owner=draw.choice(["one", "two"]),
            priority=draw.randint(-1, 2),
            tenant=draw.choice(["", "", "another"]),
            lora_id=draw.choice([0, 0, 1, 2]) if self.bench.config.max_loras else 0,
            **({"pooling": LAST} if is_pooled else others),
        )
        try:
            self.bench.add(spec, self.now)
        except (NeverFits, ValueError):
            assert spec.request_id not in self.bench.specs
        else:
            self.counts["requests"] += 1


def play(seeds: Iterable[int]) -> Counter[str]:
    counts = Counter[str]()
    for seed in seeds:
        try:
            counts += Trace(seed).play()
        except Exception as error:
            error.add_note(f"trace {seed}")
            raise
    return counts


def test_drafts_change_no_token_in_random_traces() -> None:
    counts = play(range(NUM_TRACES))
    assert counts["drafts"] > 2 * NUM_TRACES
    assert counts["drafts"] > counts["accepted"] > counts["drafts"] / 3
    assert min(counts["preemptions"], counts["swaps"], counts["deaths"]) > NUM_TRACES / 10


def _forget_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is not told where a sequence ends."""
    add_new = StepBuilder.add_new
    monkeypatch.setattr(StepBuilder, "add_new", lambda step, sequence, _=0: add_new(step, sequence))


def _take_back_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that has started over loses drafts of its time before."""

    def take_back(sampled: list[Sequence], drafts: tuple[int, ...], counts: tuple[int, ...]) -> None:
        for sequence, num_drafts, count in zip(sampled, drafts, counts, strict=True):
            sequence.num_scheduled -= 1 + num_drafts - count

    monkeypatch.setattr(answers, "_take_back", take_back)


def _narrow_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window keeps as many blocks as without drafts."""
    kv_groups: Any = CoreConfig.kv_groups

    def narrow(config: CoreConfig) -> KvBlockGroups:
        return kv_groups.fget(replace(config, max_draft_tokens=0))

    monkeypatch.setattr(CoreConfig, "kv_groups", property(narrow))


def count_preemptions_alone(windows: tuple[int, ...], num_prompt: int, right: float) -> int:
    """A sequence runs in a pool that has just what it needs."""
    config = configure(
        block_size=1,
        num_device_blocks=1000,
        num_host_blocks=0,
        max_prefill_chunk=1,
        max_steps_in_flight=3,
        kv_windows=windows,
        max_draft_tokens=11,
        max_draft_rows=16,
    )
    num_blocks = config.kv_groups.count_blocks(num_prompt + 59)
    bench = Bench(replace(config, num_device_blocks=1 + num_blocks))
    bench.worker.drafter = HostileDrafter(right=right, again=0.0)
    bench.add(make_spec("a", num_prompt, 60))
    bench.run(depth=3)
    bench.check_tokens()
    return bench.scheduler.stats().num_preemptions_total


@pytest.mark.parametrize("windows", [(0,), *WINDOWS])
def test_a_sequence_alone_never_loses_its_blocks_to_its_own_drafts(windows: tuple[int, ...]) -> None:
    assert [count_preemptions_alone(windows, n, right) for n in (1, 5) for right in (0.0, 0.75, 1.0)] == [0] * 6


def test_the_traces_see_a_worker_that_does_not_know_where_a_sequence_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    _forget_lengths(monkeypatch)
    with pytest.raises(Exception, match="drafts past its end"):
        play(range(NUM_TRACES))


def test_the_traces_see_a_bound_that_outlives_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    _take_back_all(monkeypatch)
    with pytest.raises(AssertionError, match=r"computed what was not scheduled|waits and has KV"):
        play(range(NUM_TRACES))


def test_a_sequence_alone_sees_windows_that_are_too_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    _narrow_windows(monkeypatch)
    assert count_preemptions_alone((4,), 1, 0.0) > 0


# What a step allows


def drafting(num_sequences: int = 1, num_tokens: int = 30, **changes: Any) -> Bench:
    """Sequences in decode, whose next step is the first with drafts, unless the worker was asked before."""
    bench = Bench(configure(max_draft_tokens=4, max_draft_rows=8, **changes))
    bench.worker.drafter = HostileDrafter(right=1.0, again=0.0)
    for number in range(num_sequences):
        bench.add(make_spec(f"s{number}", 6, num_tokens))
    bench.step()
    return bench


def drafts_of(step: SchedulerOutput) -> dict[int, int]:
    return dict(zip(step.sequence_ids, step.max_draft_tokens, strict=True)) if step.max_draft_tokens else {}


def test_without_speculation_nothing_is_said_of_it() -> None:
    bench = Bench()
    bench.add(make_spec("a", 6, 9))
    for step in (bench.send(), bench.send()):
        assert not step.max_draft_tokens and not step.draft_prices
        assert not any(new.max_length for new in step.new_sequences)


def test_a_decode_may_draft_and_the_worker_knows_where_it_ends() -> None:
    bench = drafting()
    assert [new.max_length for new in bench.steps[0].new_sequences] == [36]
    assert not bench.steps[0].max_draft_tokens
    assert drafts_of(bench.send()) == {1: 4}
    # The next step does not know how many tokens this one brings.
    assert drafts_of(bench.send()) == {1: 4}
    assert bench.scheduler._queues.running[0].num_scheduled == 6 + 2 * 5
    bench.run()
    bench.check_tokens()


def test_a_draft_goes_no_further_than_the_sequence() -> None:
    bench = drafting(num_tokens=4)
    # One token is known, and this step and the next one bring one each at least; the last token is never computed.
    assert drafts_of(bench.send()) == {1: 1}
    assert not drafts_of(bench.send())
    bench.run()
    bench.check_tokens()
    assert sum(bool(step.sequence_ids) for step in bench.steps) < 4


def test_decodes_share_the_rows_of_a_step_and_take_turns_to_have_more() -> None:
    bench = drafting(3)
    seen = [drafts_of(bench.step()) for _ in range(3)]
    assert [sorted(each.values()) for each in seen] == [[2, 3, 3]] * 3
    assert {min(each, key=each.__getitem__) for each in seen} == {1, 2, 3}


def test_drafts_leave_tokens_to_prefills() -> None:
    bench = drafting(max_num_batched_tokens=8)
    bench.add(make_spec("b", 20, 3))
    step = bench.step()
    assert dict(zip(step.sequence_ids, step.num_new_tokens, strict=True)) == {1: 1, 2: 7}
    assert not step.max_draft_tokens


@pytest.mark.parametrize(("num_free", "expected"), [(2, {1: 1, 2: 1}), (3, {1: 4, 2: 1}), (4, {1: 4, 2: 4})])
def test_drafts_take_no_block_that_others_will_need(num_free: int, expected: dict[int, int]) -> None:
    """In its last block each of two has room for a draft; beyond that one block for each has to stay free."""
    bench = drafting(2, num_tokens=10, num_device_blocks=1 + 4 + num_free)
    assert bench.scheduler.stats().num_free_device_blocks == num_free
    assert drafts_of(bench.send()) == expected


def test_who_may_not_draft() -> None:
    """The last piece of a prompt is no decode, even of one token; beams never draft."""
    bench = drafting(max_prefill_chunk=4)
    bench.step()
    beams = bench.add(make_spec("beams", 4, 9, beams=BeamSearch(2)))
    prefill = bench.add(make_spec("prefill", 9, 9))
    steps = [bench.step() for _ in range(4)]
    assert [dict(zip(step.sequence_ids, step.num_new_tokens, strict=True)).get(prefill) for step in steps] == [
        4,
        4,
        1,
        1,
    ]
    allowed = [{sequence_id for sequence_id, most in drafts_of(step).items() if most} for step in steps]
    assert allowed == [{1}, {1}, {1}, {1, prefill}]
    assert any(sequence_id > beams for sequence_id in steps[-1].sequence_ids)


def test_a_suspect_drafts_nothing() -> None:
    bench = drafting(2)
    bench.lose_worker(["s0"])
    bench.send()
    assert drafts_of(bench.send()) == {1: 0, 2: 4}
    # A token clears it.
    bench.answer()
    bench.answer()
    bench.add(make_spec("b"))
    bench.step()
    assert drafts_of(bench.step())[1]


# What an answer may say


def test_a_sequence_that_is_asked_again_computes_the_same_token_again() -> None:
    bench = drafting()
    step = bench.send()
    bench.take(StepResult(step.step_id, (1,), (), num_tokens=(0,), num_draft_tokens=2))
    bench.in_flight.clear()
    [sequence] = bench.scheduler._queues.running
    assert len(sequence.token_ids) == 7
    assert sequence.num_scheduled == sequence.num_computed == 6
    assert bench.send().num_new_tokens == (1,)
    assert sequence.num_scheduled == 7 + 4


def test_a_run_ends_where_a_sequence_ends() -> None:
    bench = drafting()
    bench.add(make_spec("b", 6, 30, stop={9}))
    bench.step()
    step = bench.send()
    ids = step.sequence_ids
    assert step.max_draft_tokens == (4, 4)
    told = tuple((sequence_id, f"{sequence_id}.{place}") for sequence_id in ids for place in range(3))
    result = StepResult(step.step_id, ids, (1, 2, 3, 8, 9, 7), num_tokens=(3, 3), num_draft_tokens=8, logprobs=told)
    bench.in_flight.clear()
    [update] = bench.scheduler.update(result).values()
    assert update.sequence_ids == [1, 1, 1, 2, 2]
    assert update.token_ids == [1, 2, 3, 8, 9]
    assert [(end.sequence_id, end.reason) for end in update.ended] == [(2, FinishReason.STOP)]
    assert update.logprobs == [(1, "1.0"), (1, "1.1"), (1, "1.2"), (2, "2.0"), (2, "2.1")]


@pytest.mark.parametrize(("num_tokens", "num_ids"), [((6,), 6), ((0, 1), 1), ((), 2), ((2,), 1), ((1, 1), 2)], ids=repr)
def test_other_numbers_of_tokens_than_allowed_are_no_answer(num_tokens: tuple[int, ...], num_ids: int) -> None:
    bench = drafting()
    step = bench.send()
    with pytest.raises(StepMismatch):
        bench.scheduler.update(StepResult(step.step_id, (1,), (1,) * num_ids, num_tokens=num_tokens))
    bench.answer()


def test_who_may_not_draft_has_one_token() -> None:
    bench = Bench(configure(max_draft_tokens=4, max_draft_rows=4))
    bench.add(make_spec("a", 6, 9))
    step = bench.send()
    for count in (0, 2):
        with pytest.raises(StepMismatch):
            bench.scheduler.update(StepResult(step.step_id, (1,), (1,) * count, num_tokens=(count,)))


def test_a_worker_that_finds_nothing_looks_seldom_until_it_finds_something() -> None:
    bench = drafting(num_tokens=190, prices_drafts=True)
    seen: list[bool] = []

    def answer(num_drafted: int) -> None:
        step = bench.send()
        bench.in_flight.clear()
        seen.append(bool(step.max_draft_tokens))
        counts = {"num_tokens": (1,), "num_draft_tokens": num_drafted} if step.max_draft_tokens else {}
        bench.take(StepResult(step.step_id, (1,), (9,), **counts))

    for _ in range(140):
        answer(0)
    assert all(seen[:16])
    assert 1 <= sum(seen[-20:]) < 10
    while sum(seen[-3:]) < 3:
        answer(4)
    assert len(seen) < 155


# Where drafts come from


def predicting(step: SchedulerOutput, *predictions: tuple[int, int, int]) -> StepResult:
    counts = {"num_tokens": (3,), "num_draft_tokens": 4, "num_accepted_tokens": 2}
    return StepResult(step.step_id, (1,), (9, 8, 7), num_forced_tokens=1, predictions=predictions, **counts)


def test_the_owner_is_told_what_became_of_predictions_so_far() -> None:
    bench = drafting()
    told = []
    for _ in range(2):
        step = bench.send()
        bench.in_flight.clear()
        [update] = bench.scheduler.update(predicting(step, (1, 3, 2))).values()
        told += update.predictions
    assert told == [(1, PredictionUsage(2, 1)), (1, PredictionUsage(4, 2))]
    assert bench.scheduler.stats().drafts_total == DraftCounts(Sources(0, 2, 6), Sources(0, 0, 4))
    # The counts go with the request to another worker, and to another scheduler.
    [evacuated] = bench.scheduler.evacuate()
    [sequence] = evacuated.group.sequences
    record = sequence.make_record()
    assert record.prediction == PredictionUsage(4, 2)
    group = Group(evacuated.group.spec, 5, evacuated.group.max_length, 0.0)
    group.continue_from([record], 0)
    assert group.sequences[0].make_record() == record


def test_predictions_of_others_are_no_answer() -> None:
    bench = drafting()
    step = bench.send()
    with pytest.raises(StepMismatch, match="predictions"):
        bench.scheduler.update(predicting(step, (2, 1, 1)))


# Prices


def test_prices_come_with_the_drafts_and_none_where_no_draft_can_pay() -> None:
    bench = drafting(2, prices_drafts=True)
    bench.scheduler.seed_pace((1, 2, 4, 8), (1.0, 1.0, 1.5, 9.0))
    step = bench.step()
    assert step.draft_prices == (500, 500)
    assert sum(step.max_draft_tokens) == 2
    bench.scheduler.seed_pace((1, 2, 4, 8), (1.0, 2.0, 4.0, 8.0))
    step = bench.step()
    assert not step.draft_prices and not step.max_draft_tokens
    bench.run()
    bench.check_tokens()
