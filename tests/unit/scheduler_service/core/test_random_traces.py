"""The master oracle over random traces: whatever happens around it, a sequence gets the tokens of running alone.

A model worker executes every step strictly, with up to two steps in flight, in tiny pools that force preemption.
All state is walked after every operation, and at the end every block is free and the worker knows nobody.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blockyard.contract.sampling import BeamSearch, EarlyStopping, FinishReason
from scheduler_service.core.scheduler import NeverFits
from tests.unit.scheduler_service.core.harness import LAST, MEAN, VOCAB_SIZE, Bench, configure, make_spec

if TYPE_CHECKING:
    from scheduler_service.core.values import SchedulerOutput

PREFIX = tuple((place * 5 + 3) % VOCAB_SIZE for place in range(24))

configurations = st.builds(
    configure,
    block_size=st.sampled_from([1, 2, 3, 4]),
    num_device_blocks=st.integers(4, 14),
    num_host_blocks=st.sampled_from([0, 2, 5, 20]),
    max_model_len=st.sampled_from([8, 20, 40]),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.sampled_from([1, 3, 6, 16]),
    max_prefill_chunk=st.sampled_from([0, 0, 2, 3]),
    enable_prefix_caching=st.sampled_from([True, True, True, False]),
    preemption_mode=st.sampled_from(["auto", "swap", "recompute"]),
    max_steps_in_flight=st.sampled_from([1, 2, 2, 2, 3]),
    num_virtual_engines=st.sampled_from([1, 1, 1, 2, 3]),
    watermark=st.sampled_from([0.0, 0.1, 0.2]),
    policy=st.sampled_from(["fcfs", "priority", "priority"]),
    aging_seconds=st.sampled_from([0.0, 1.0, 5.0, 1e9]),
    victims=st.sampled_from(["last", "auto"]),
    enable_host_prefix_cache=st.sampled_from([True, True, False]),
    target_step_seconds=st.sampled_from([0.0, 1e-6, 1.0]),
    max_loras=st.sampled_from([0, 1, 2]),
    whole_prompts=st.sampled_from([False, False, False, True]),
)
prompts = st.builds(
    lambda num_shared, tail: PREFIX[:num_shared] + tuple(tail),
    st.integers(0, 16),
    st.lists(st.integers(0, 3), max_size=4),
).filter(bool)


beams = st.one_of(
    st.none(),
    st.builds(BeamSearch, st.integers(2, 4), st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.sampled_from(EarlyStopping)),
)


class Traces(RuleBasedStateMachine):
    """Adds, aborts, schedules and answers in any order."""

    configurations: ClassVar = configurations

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.bench = Bench(data.draw(self.configurations))
        self.aborted: set[tuple[str, int]] = set()
        self.num_requests = 0
        self.now = 0.0

    @rule(
        prompt=prompts,
        n=st.integers(1, 3),
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 3),
        stop=st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=6),
        owner=st.sampled_from(["one", "two"]),
        priority=st.integers(-1, 2),
        tenant=st.sampled_from(["", "", "another"]),
        beams=beams,
        lora_id=st.sampled_from([0, 0, 1, 2, 3]),
        pooling=st.sampled_from([None, None, LAST, MEAN]),
        cache_salt=st.sampled_from([b"", b"", b"one", b"two"]),
    )
    def add(self, prompt, **others) -> None:
        if not self.bench.config.max_loras:
            others["lora_id"] = 0
        if self.bench.config.whole_prompts or others["pooling"]:
            # Such a model makes numbers, and nothing else.
            others |= {"pooling": others["pooling"] or MEAN, "n": 1, "max_tokens": 0, "beams": None}
        spec = make_spec(f"r{self.num_requests}", prompt, **others)
        self.num_requests += 1
        self.now += 1.0
        try:
            self.bench.add(spec, self.now)
        except (NeverFits, ValueError):
            assert spec.request_id not in self.bench.specs

    @precondition(lambda self: self.bench.specs)
    @rule(data=st.data(), index=st.sampled_from([None, 0, 1, 2]), reason=st.sampled_from(FinishReason))
    def abort(self, data: st.DataObject, index: int | None, reason: FinishReason) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.bench.specs)))
        self.bench.scheduler.abort(request_id, index, reason)
        assert not self.bench.scheduler.abort(request_id, index)
        if index is None or not self.bench.specs[request_id].beams:
            self.aborted |= {(request_id, i) for i in range(3) if index in (None, i)}

    @rule()
    def schedule(self) -> None:
        self.bench.now = self.now
        may_send = self.bench.scheduler.can_schedule()
        step = self.bench.schedule()
        assert may_send or step is None
        if step is not None:
            self.check_writes(step)
        is_idle = step is None and not self.bench.in_flight and self.bench.scheduler.has_unfinished()
        assert not is_idle, "work, nothing in flight, and nothing to do"

    def check_writes(self, step: SchedulerOutput) -> None:
        """No step writes into a block that somebody else holds or that is found by its content."""
        device = self.bench.scheduler._blocks.device
        size = self.bench.config.block_size
        in_step = dict(zip(step.sequence_ids, step.num_new_tokens, strict=True))
        for sequence in self.bench.scheduler._queues.running:
            count = in_step.get(sequence.sequence_id, 0)
            assert count in (0, len(sequence.token_ids)) or not self.bench.config.whole_prompts
            first = (sequence.num_scheduled - count) // size
            num_in_flight = sum(sequence in each.sampled for each in self.bench.scheduler._in_flight)
            if num_in_flight and count:
                # All drafts in flight may be wrong.
                first = min(first, (len(sequence.token_ids) + num_in_flight - 2) // size)
            last = -(-sequence.num_scheduled // size)
            num_groups = len(self.bench.config.kv_windows)
            for block in sequence.block_ids[first * num_groups : last * num_groups] if count else ():
                is_forked_now = any(fork.parent_id == sequence.sequence_id for fork in step.forks)
                assert device.references[block] == 1 or is_forked_now
                assert not device.is_published(block)

    @rule(forward_seconds=st.sampled_from([0.0, 1e-5, 1e-3]), cache_seconds=st.sampled_from([0.0, 1e-5, 1e-1]))
    def worker_takes_other_times(self, **seconds: float) -> None:
        """Swapping may be dear or cheap, which decides much and changes no token."""
        self.bench.times = (seconds["forward_seconds"], seconds["cache_seconds"])

    @precondition(lambda self: self.bench.in_flight)
    @rule()
    def answer(self) -> None:
        self.bench.answer()

    @rule()
    def prefix_cache_is_reset(self) -> None:
        """Steps are on their way; what nobody holds is forgotten, and nothing else."""
        scheduler = self.bench.scheduler
        before = scheduler.stats()
        reset = scheduler.reset_prefix_cache()
        now = scheduler.stats()
        assert now.num_cached_device_blocks == reset.num_kept_device_blocks
        assert before.num_cached_device_blocks == reset.num_kept_device_blocks + reset.num_forgotten_device_blocks
        assert now.num_free_device_blocks == before.num_free_device_blocks
        assert now.num_free_host_blocks == before.num_free_host_blocks

    @rule(suspects=st.sets(st.integers(0, 20)))
    def worker_dies(self, suspects: set[int]) -> None:
        """Whatever was on its way is lost, and nothing else. Suspects run one at a time, which changes no token."""
        live = list(self.bench.scheduler._groups)
        self.bench.lose_worker([live[place] for place in suspects if place < len(live)])
        stats = self.bench.scheduler.stats()
        assert stats.num_free_device_blocks == stats.num_device_blocks
        assert (stats.num_running, stats.num_swapped, stats.num_cached_device_blocks) == (0, 0, 0)

    @rule(
        block_size=st.sampled_from([1, 2, 3, 4]),
        num_device_blocks=st.integers(4, 14),
        num_host_blocks=st.sampled_from([0, 5]),
    )
    def worker_with_other_pools_comes(self, **pools: int) -> None:
        """Who can never fit fails; the others go on."""
        self.bench.change_worker(replace(self.bench.config, **pools))
        self.aborted |= {(request_id, i) for request_id in self.bench.failed for i in range(3)}

    @rule(num_steps=st.integers(1, 12))
    def go_on(self, num_steps: int) -> None:
        """With the pipeline full, as it is in life."""
        for _ in range(num_steps):
            self.now += 0.5
            self.bench.now = self.now
            while self.bench.scheduler.can_schedule() and self.bench.schedule() is not None:
                pass
            if self.bench.in_flight:
                self.bench.answer()

    @invariant()
    def is_consistent(self) -> None:
        self.bench.scheduler.check_integrity()
        if not self.bench.in_flight:
            self.bench.check_cached()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.run(self.bench.config.max_steps_in_flight)
        self.bench.check_tokens()
        pooled = {spec.request_id for spec in self.bench.specs.values() if spec.pooling}
        assert self.bench.pooled.keys() <= pooled <= {*self.bench.pooled, *(name for name, _ in self.aborted)}
        for name, tokens in self.bench.tokens.items():
            assert name in self.bench.finished or name in self.aborted
            assert tokens == self.bench.generate_alone(*name)[: len(tokens)]


class WindowTraces(Traces):
    """The same of models whose layers see windows, alone or beside others that see all."""

    configurations = st.builds(
        lambda config, factor, windows: replace(
            config, num_device_blocks=config.num_device_blocks * factor, kv_windows=windows, whole_prompts=False
        ),
        configurations,
        st.integers(1, 4),
        st.sampled_from([(0, 3), (0, 5, 5), (4,), (2, 0), (0, 3, 7), (1,), (6, 0, 0)]),
    )


class DraftTraces(Traces):
    """The same of a worker that drafts as it likes."""

    configurations = st.builds(
        lambda config, **drafts: replace(config, num_virtual_engines=1, whole_prompts=False, **drafts),
        st.one_of(configurations, WindowTraces.configurations),
        max_draft_tokens=st.sampled_from([1, 2, 4, 7]),
        max_draft_rows=st.sampled_from([1, 4, 16]),
        prices_drafts=st.booleans(),
    )


class StateTraces(Traces):
    """The same of models whose layers have a state, alone or beside others that see all or a window."""

    configurations = st.builds(
        lambda config, **others: replace(config, whole_prompts=False, **others),
        configurations,
        num_device_blocks=st.integers(6, 30),
        num_host_blocks=st.sampled_from([0, 6, 20, 40, 40]),
        max_model_len=st.sampled_from([20, 40]),
        preemption_mode=st.sampled_from(["swap", "swap", "auto", "recompute"]),
        kv_windows=st.sampled_from([(0,), (0,), (0,), (), (0, 3), (4,)]),
        num_state_blocks=st.integers(1, 3),
        state_snapshot_tokens=st.sampled_from([0, 1, 2, 3, 4, 8]),
    )

    @precondition(lambda self: self.bench.specs)
    @rule(data=st.data(), tail=st.lists(st.integers(0, 3), min_size=1, max_size=3), max_tokens=st.integers(1, 8))
    def next_turn(self, data: st.DataObject, tail: list[int], max_tokens: int) -> None:
        """A request goes on from another one and what that has generated so far: it may begin from its states."""
        before = self.bench.specs[data.draw(st.sampled_from(sorted(self.bench.specs)))]
        output = self.bench.tokens[before.request_id, 0]
        prompt = (*before.prompt_token_ids, *output, *tail)
        self.add(
            prompt=prompt,
            n=1,
            max_tokens=max_tokens,
            min_tokens=0,
            stop=frozenset[int](),
            owner="one",
            priority=0,
            tenant="",
            beams=None,
            lora_id=before.lora_id,
            pooling=None,
            cache_salt=before.cache_salt,
        )


Traces.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTraces = Traces.TestCase
WindowTraces.TestCase.settings = settings(Traces.TestCase.settings, max_examples=100)
TestWindowTraces = WindowTraces.TestCase
StateTraces.TestCase.settings = settings(Traces.TestCase.settings, max_examples=100)
TestStateTraces = StateTraces.TestCase
DraftTraces.TestCase.settings = settings(Traces.TestCase.settings, max_examples=60)
TestDraftTraces = DraftTraces.TestCase
