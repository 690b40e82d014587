"""A scheduler and a model worker, with all that the owners were told."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from blockyard.common.v1 import pooling_pb2
from scheduler_service.core.blocks.prefix_lookup import hash_block, name_of_group, name_of_state, root_hash
from scheduler_service.core.scheduler import CoreConfig, Scheduler
from scheduler_service.core.values import GroupSpec, LoraSpec, OwnerUpdate, SchedulerOutput, StepResult
from tests.kit.oracles import model_worker
from tests.kit.oracles.core_requests import add_request
from tests.kit.oracles.hostile_drafter import HostileDrafter
from tests.kit.oracles.model_worker import (
    ModelWorker,
    extend_name,
    generate_alone,
    name_in_group,
    pool_alone,
    root_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from blockyard.contract.sampling import BeamSearch, FinishReason

VOCAB_SIZE = 32
LAST, MEAN = (
    pooling_pb2.Pooling(kind=kind).SerializeToString()
    for kind in (pooling_pb2.POOLING_KIND_LAST, pooling_pb2.POOLING_KIND_MEAN)
)

CONFIG = CoreConfig(
    block_size=4,
    num_device_blocks=65,
    num_host_blocks=64,
    max_model_len=200,
    max_num_seqs=16,
    max_num_batched_tokens=64,
    watermark=0.0,
    debug_integrity=True,
)


def configure(**changes: Any) -> CoreConfig:
    """The usual configuration with changes."""
    return replace(CONFIG, **changes)


def make_spec(
    request_id: str = "r",
    prompt: int | tuple[int, ...] = 6,
    max_tokens: int = 5,
    *,
    n: int = 1,
    min_tokens: int = 0,
    stop: frozenset[int] | set[int] = frozenset(),
    owner: str = "gateway",
    priority: int = 0,
    tenant: str = "",
    beams: BeamSearch | None = None,
    lora_id: int = 0,
    pooling: bytes | None = None,
    cache_salt: bytes = b"",
) -> GroupSpec:
    """A request. A prompt given as a length differs from those of all other request ids."""
    if isinstance(prompt, int):
        prompt = tuple((sum(request_id.encode()) + place * place) % VOCAB_SIZE for place in range(prompt))
    return GroupSpec(
        request_id,
        owner,
        prompt,
        n,
        max_tokens,
        min_tokens,
        frozenset(stop),
        tenant=tenant,
        priority=priority,
        beams=beams,
        lora=make_lora(lora_id) if lora_id else None,
        pooling=pooling,
        computes_prompt=pooling == MEAN,
        cache_salt=cache_salt,
    )


def make_lora(lora_id: int) -> LoraSpec:
    """An adapter: its content is its number."""
    return LoraSpec(lora_id, lora_id.to_bytes(32), f"adapter-{lora_id}")


def _worker_of(config: CoreConfig) -> ModelWorker:
    sizes = (config.block_size, config.num_device_blocks, config.num_host_blocks)
    return ModelWorker(
        *sizes,
        vocab_size=VOCAB_SIZE,
        takes_ids=config.num_virtual_engines > 1,
        max_loras=config.max_loras,
        windows=config.kv_windows,
        max_draft_tokens=config.max_draft_tokens,
        max_draft_rows=config.max_draft_rows,
        drafter=HostileDrafter() if config.max_draft_tokens else None,
        num_state_blocks=config.num_state_blocks,
    )


class Bench:
    """Drives a scheduler by hand. A step is executed when it is answered: the order is what matters."""

    def __init__(self, config: CoreConfig = CONFIG) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.worker = _worker_of(config)
        self.in_flight: deque[SchedulerOutput] = deque()
        self.steps: list[SchedulerOutput] = []
        self.specs: dict[str, GroupSpec] = {}
        self.names: dict[int, tuple[str, int]] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], FinishReason] = {}
        self.prefilled: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        self.pooled: dict[str, bytes] = {}
        self._next_sequence_id = 1
        self.now = 0.0
        self.times = (0.0, 0.0)  # what the worker says that a step takes: to compute, and to move blocks

    def add(self, spec: GroupSpec, now: float = 0.0) -> int:
        """Queue a request; the id of its first sequence."""
        first = self._next_sequence_id
        add_request(self.scheduler, spec, first, now)
        self._next_sequence_id += spec.num_sequence_ids
        self.specs[spec.request_id] = spec
        for index in range(spec.n):
            self.names[first + index] = (spec.request_id, index)
            self.tokens[spec.request_id, index] = []
        return first

    def schedule(self) -> SchedulerOutput | None:
        """Make a step and send it."""
        step = self.scheduler.schedule(self.now)
        if step is not None:
            self.in_flight.append(step)
            self.steps.append(step)
        return step

    def send(self) -> SchedulerOutput:
        """Make a step that must be there, and send it."""
        step = self.schedule()
        assert step is not None
        return step

    def answer(self) -> dict[str, OwnerUpdate]:
        """Execute the oldest step and take its answer."""
        result = self.worker.execute(self.in_flight.popleft())
        forward_seconds, cache_seconds = self.times
        return self.take(replace(result, forward_seconds=forward_seconds, cache_seconds=cache_seconds))

    def take(self, result: StepResult) -> dict[str, OwnerUpdate]:
        """Take an answer."""
        updates = self.scheduler.update(result)
        self.note(updates)
        return updates

    def note(self, updates: dict[str, OwnerUpdate]) -> None:
        """Keep what owners were told; nobody is told of another's sequence, or of an end twice."""
        for owner, update in updates.items():
            assert len(update.sequence_ids) == len(update.token_ids)
            for sequence_id, token_id in zip(update.sequence_ids, update.token_ids, strict=True):
                name = self.names[sequence_id]
                assert self.specs[name[0]].owner == owner
                assert name not in self.finished
                self.tokens[name].append(token_id)
            for ended in update.ended:
                name = self.names[ended.sequence_id]
                assert name not in self.finished
                self.finished[name] = ended.reason
            for sequence_id, num_cached_tokens in update.prefilled:
                request_id = self.names[sequence_id][0]
                assert request_id not in self.prefilled
                self.prefilled[request_id] = num_cached_tokens
            for sequence_id, values in update.pooled:
                request_id = self.names[sequence_id][0]
                assert request_id not in self.pooled
                self.pooled[request_id] = values
            self.failed.update(update.failed)

    def lose_worker(self, suspects: Iterable[str] = ()) -> list[tuple[str, int]]:
        """The worker dies with all that it has not answered, maybe of one of these requests; another one is there.

        Returns which requests lost how many tokens.
        """
        return self._move(self.scheduler, suspects)[0]

    def change_worker(self, config: CoreConfig) -> dict[str, OwnerUpdate]:
        """The same, but the other one has other pools."""
        self.config = config
        scheduler = Scheduler(config)
        scheduler.succeed(self.scheduler)
        return self._move(scheduler)[1]

    def _move(
        self, successor: Scheduler, suspects: Iterable[str] = ()
    ) -> tuple[list[tuple[str, int]], dict[str, OwnerUpdate]]:
        self.in_flight.clear()
        self.worker = _worker_of(self.config)
        evacuated = self.scheduler.evacuate()
        self.scheduler.check_integrity()
        self.scheduler = successor
        wanted = set(suspects)
        successor._planner.suspects.replace(group for group, _ in evacuated if group.spec.request_id in wanted)
        updates = successor.adopt(group for group, _ in evacuated)
        self.note(updates)
        return [(group.spec.request_id, lost) for group, lost in evacuated if lost], updates

    def step(self) -> SchedulerOutput:
        """One step, with its answer."""
        step = self.send()
        while self.in_flight:
            self.answer()
        return step

    def run(self, depth: int = 2, max_steps: int = 2000) -> None:
        """To the end, with so many steps in flight."""
        for _ in range(max_steps):
            while len(self.in_flight) < depth and self.scheduler.can_schedule() and self.schedule() is not None:
                pass
            if not self.in_flight:
                break
            self.answer()
        self.check_done()

    def check_done(self) -> None:
        """Nothing is left anywhere, no block is held, and the worker has forgotten everybody."""
        assert not self.scheduler.has_unfinished()
        assert not self.scheduler.can_schedule()
        stats = self.scheduler.stats()
        assert stats.num_free_device_blocks == stats.num_device_blocks
        assert stats.num_free_host_blocks == stats.num_host_blocks
        assert (stats.num_waiting, stats.num_running, stats.num_swapped, stats.num_steps_in_flight) == (0, 0, 0, 0)
        assert not self.worker.rows

    def check_tokens(self) -> None:
        """The master oracle: each sequence that was told to have ended got the tokens of running alone."""
        for name in self.finished:
            assert self.tokens[name] == self.generate_alone(*name), name
        for request_id, values in self.pooled.items():
            assert values == pool_alone(self.specs[request_id]), request_id

    def check_cached(self) -> None:
        """With nothing in flight: every block that is found by its hash, in both pools, holds what the hash says."""
        assert not self.in_flight
        size = self.config.block_size
        for spec, tokens in self._walk_prefixes():
            block_hash, names = root_hash(spec.cache_salt), [root_of(spec)]
            for start in range(0, len(tokens) - size + 1, size):
                extra_keys = spec.lora.digest if spec.lora else b""
                block_hash = hash_block(block_hash, tokens[start : start + size], extra_keys)
                for token_id in tokens[start : start + size]:
                    names.append(extend_name(names[-1], token_id))
                for group in range(len(self.config.kv_windows)):
                    self._check_found(name_of_group(block_hash, group) if group else block_hash, names[-size:], group)
                for place in range(self.config.num_state_blocks):
                    name = model_worker.name_of_state(names[-1], place)
                    self._check_found(name_of_state(block_hash, place), [name] * size)

    def _check_found(self, block_hash: bytes, names: list[int], group: int = 0) -> None:
        size, blocks = self.config.block_size, self.scheduler._blocks
        wanted = [name_in_group(name, group) for name in names]
        for pool, slots in ((blocks.device, self.worker.device), (blocks.host, self.worker.host)):
            block = pool.find(block_hash)
            if block is not None:
                assert slots[block * size : (block + 1) * size] == wanted, (block, pool)

    def _walk_prefixes(self) -> Iterator[tuple[GroupSpec, tuple[int, ...]]]:
        for (request_id, _), output in self.tokens.items():
            spec = self.specs[request_id]
            yield spec, spec.prompt_token_ids + tuple(output)

    def generate_alone(self, request_id: str, sequence_index: int) -> list[int]:
        """The truth."""
        return generate_alone(
            self.specs[request_id], sequence_index, max_model_len=self.config.max_model_len, vocab_size=VOCAB_SIZE
        )


def rows(step: SchedulerOutput) -> dict[int, int]:
    """What a step computes: sequence ids and numbers of tokens."""
    return dict(zip(step.sequence_ids, step.num_new_tokens, strict=True))


def crowd(mode: str, num_device_blocks: int = 5, **changes: object) -> Bench:
    """Two sequences in decode, with two blocks each and no other: in the third step the first one needs a third."""
    bench = Bench(configure(num_device_blocks=num_device_blocks, preemption_mode=mode, **changes))
    bench.add(make_spec("a", 7, 6))
    bench.add(make_spec("b", 4, 6))
    bench.step()
    bench.step()
    return bench


def small_beside_large(mode: str) -> Bench:
    """a runs, b was preempted and does not fit beside it, and c would."""
    bench = Bench(configure(num_device_blocks=7, preemption_mode=mode))
    bench.add(make_spec("a", 7, 6))
    bench.add(make_spec("b", 12, 6))
    for _ in range(3):
        bench.step()
    assert bench.scheduler.stats().num_running == 1
    assert bench.scheduler.stats().num_free_device_blocks == 3
    bench.add(make_spec("c", 1, 2))
    return bench
