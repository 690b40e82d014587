"""Runs the network on forward batches, synchronously or launched ahead, and chooses tokens from its logits.

Owns the hand-over from rows (numpy) to the device (torch). Knows no messages, no states and no sequences' ids.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from blockyard.capacity.steps import max_prompt_rows
from blockyard_kernels.capture import CapturedStep, CaptureSizes, StepInputs
from blockyard_kernels.launching import Launched, upload
from worker_service.batch.forward_batch import UNKNOWN, ForwardBatch, PromptRows, StepLayout
from worker_service.lora.slots import AdapterSlots
from worker_service.runner.chooser import Chooser
from worker_service.sampling import logprobs
from worker_service.sampling.sampler import BeamCandidates, Sampled, SampleRows
from worker_service.step import NOTHING_POOLED, Array, Logprobs, Pooled, PromptPieceLogprobs, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from blockyard_kernels.collectives import Ranks
    from blockyard_kernels.lora import LoraRows
    from blockyard_kernels.ops import AttentionBatch
    from worker_service.batch.input_batch import InputBatch
    from worker_service.cache_engine import CacheEngine
    from worker_service.models.loader import RunnableModel


@dataclass(frozen=True, slots=True, eq=False)
class RunnerOutput:
    """The output of a step: sampled tokens or pooled vectors, candidates of beams, logprobs of prompts, and times."""

    sampled: Sampled = field(default_factory=Sampled)
    candidates: BeamCandidates = field(default_factory=BeamCandidates)
    prompt_logprobs: tuple[PromptPieceLogprobs, ...] = ()
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    pooled: Pooled = NOTHING_POOLED


class ModelRunner:
    """One model on one device. Used by the device thread alone."""

    def __init__(self, loaded: RunnableModel, slots: AdapterSlots | None = None) -> None:
        self.slots = slots or AdapterSlots()
        self._has_slots = self.slots.lora_ids.size > 0
        self.config = loaded.config
        self.model = loaded.model
        self.backend = loaded.backend
        self.chooser = Chooser(self.backend, self.config.vocab_size)
        self.captured: CapturedStep | None = None
        self._ranks: Ranks | None = None
        # Only the last stage makes logits and samples.
        self.has_head = loaded.model.share.is_last_stage
        # The token that each row of the batch sampled last, int64 on the device.
        self._last_tokens = torch.zeros(0, dtype=torch.int64, device=self.backend.device)
        self._rows_of: tuple[StepLayout, Tensor] | None = None
        self.on_compute: Callable[[], None] = _nothing
        """Called when a step computes next, which takes no Python for a while."""

    @property
    def depth(self) -> int:
        """The number of launched steps that may be unfinished; 1: steps are only run, never launched."""
        return self.backend.launcher.depth

    @property
    def num_captured_bytes(self) -> int:
        return 0 if self.captured is None else self.captured.num_bytes

    def join(self, ranks: Ranks) -> None:
        """Sets the ranks of the network, from the next step on."""
        self._ranks = ranks
        self.backend.join(ranks)
        self.chooser.join(ranks.stage)

    def capture(self, kv_pool: Tensor, sizes: CaptureSizes) -> None:
        """Captures the network over a pool, if the backend can: then steps within these sizes run without Python."""
        self.captured = self.model.capture(kv_pool, replace(sizes, num_lora_slots=len(self.slots)))

    @torch.inference_mode()
    def run(self, forward_batch: ForwardBatch, batch: InputBatch, kv_pool: Tensor) -> RunnerOutput:
        """Computes a step's tokens and writes their KV; the last stage samples, or finds the candidates of beams."""
        started = time.perf_counter()
        layout, prompts = forward_batch.layout, forward_batch.prompts
        if self._has_slots:
            self.slots.bring(self.slots.take_due())
        if not len(layout.rows):
            return RunnerOutput()
        self.chooser.begin(layout, batch)
        due = layout.chosen_hidden
        lora, forward_batch = self._lora_rows(layout), self._place(forward_batch)
        if self.captured is not None and not prompts:
            columns = forward_batch.seq_lens, forward_batch.block_tables, forward_batch.token_ids
            inputs = StepInputs(layout.num_new_tokens, *columns, due, None, lora, forward_batch.fixed_tables)
            if self.captured.takes(inputs):
                return self._replay(self.captured, inputs, forward_batch, batch, started)
        token_ids = self._to_device(forward_batch.token_ids)
        self.on_compute()
        hidden = self.model.forward(token_ids, self._plan(forward_batch, batch.limits.block_size, lora), kv_pool)
        if not self.has_head:
            self._synchronize()
            return RunnerOutput(forward_seconds=time.perf_counter() - started)
        logits = self.model.compute_logits(hidden[self._to_device(due)])
        self._synchronize()
        computed = time.perf_counter()
        sampled, candidates = self.chooser.choose(logits, forward_batch, batch)
        # The logits of prompts need as much memory as the logits of samples, so the latter are freed first.
        del logits
        prompt_logprobs = self._prompt_logprobs(prompts, hidden) if prompts else ()
        return RunnerOutput(sampled, candidates, prompt_logprobs, computed - started, time.perf_counter() - computed)

    def launch(self, forward_batch: ForwardBatch, batch: InputBatch, cache: CacheEngine, step: Step) -> Launched:
        """Launches a step after its transfers. No row of the step may have to wait for the host (see `RowRequests`).

        Unknown ids are the tokens that the rows sampled last. The launched results are token ids and finite flags.
        """
        layout = forward_batch.layout
        rows, num_rows = batch.sample_rows(layout.sampled), batch.num_rows
        arrivals = self.slots.take_due() if self._has_slots else ()
        lora, placed = self._lora_rows(layout), self._place(forward_batch)

        @torch.inference_mode()
        def work() -> tuple[Tensor, ...]:
            if arrivals:
                self.slots.bring(arrivals)
            cache.transfer(step, forward_batch)
            if not len(layout.rows):
                return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
            token_ids, finite = self._compute(placed, rows, cache, num_rows, lora)
            self.backend.sampling.put_last_tokens(self._last_tokens, self._sampled_rows(layout), token_ids)
            return token_ids, finite

        return self.backend.launcher.launch(work)

    def _compute(
        self,
        forward_batch: ForwardBatch,
        rows: SampleRows,
        cache: CacheEngine,
        num_rows: int,
        lora: LoraRows | None,
    ) -> tuple[Tensor, Tensor]:
        """Computes a launched step: the tokens of its rows and which of them are finite, on the device."""
        layout = forward_batch.layout
        missing = num_rows - len(self._last_tokens)
        if missing > 0:
            self._last_tokens = torch.cat([self._last_tokens, self._last_tokens.new_zeros(missing)])
        last_tokens = self._last_tokens if forward_batch.token_ids.min() <= UNKNOWN else None
        if self.captured is not None:
            columns = forward_batch.seq_lens, forward_batch.block_tables, forward_batch.token_ids
            due, fixed_tables = layout.sampled.last_hidden, forward_batch.fixed_tables
            inputs = StepInputs(layout.num_new_tokens, *columns, due, last_tokens, lora, fixed_tables)
            if self.captured.takes(inputs):
                outputs = self.captured.replay(inputs, with_logits=not layout.sampled.is_plain_greedy)
                if outputs.logits is not None:
                    return self.chooser.sampler.launch(outputs.logits, rows)
                assert outputs.best is not None
                assert outputs.finite is not None
                return torch.from_numpy(outputs.best), torch.from_numpy(outputs.finite)
        token_ids = self._to_device(forward_batch.token_ids)
        if last_tokens is not None:
            token_ids = self.backend.sampling.take_last_tokens(token_ids, last_tokens)
        plan = self._plan(forward_batch, cache.block_format.block_size, lora)
        hidden = self.model.forward(token_ids, plan, cache.device_pool)
        logits = self.model.compute_logits(hidden[self._to_device(layout.sampled.last_hidden)])
        return self.chooser.sampler.launch(logits, rows)

    def _sampled_rows(self, layout: StepLayout) -> Tensor:
        """Returns the rows that a step samples, on the device. Steps of the same layout share the tensor."""
        if self._rows_of is None or self._rows_of[0] is not layout:
            self._rows_of = layout, self._to_device(layout.sampled.rows)
        return self._rows_of[1]

    def _replay(
        self, captured: CapturedStep, inputs: StepInputs, forward_batch: ForwardBatch, batch: InputBatch, started: float
    ) -> RunnerOutput:
        """Replays a step without log probabilities of prompts; it makes no logits if all rows are plain greedy."""
        layout = forward_batch.layout
        is_plain = not len(layout.beams) and layout.sampled.is_plain_greedy
        self.on_compute()
        outputs = captured.replay(inputs, with_logits=not is_plain)
        computed = time.perf_counter()
        if not self.has_head:
            return RunnerOutput(forward_seconds=computed - started)
        sampled, candidates = self.chooser.choose_replayed(outputs, forward_batch, batch)
        return RunnerOutput(sampled, candidates, (), computed - started, time.perf_counter() - computed)

    def _prompt_logprobs(self, pieces: Sequence[PromptRows], hidden: Tensor) -> tuple[PromptPieceLogprobs, ...]:
        lengths = [len(piece.token_ids) for piece in pieces]
        places = [np.arange(piece.first_hidden, piece.first_hidden + len(piece.token_ids)) for piece in pieces]
        found = self.compute_logprobs(
            hidden,
            np.concatenate(places),
            np.concatenate([piece.token_ids for piece in pieces]),
            np.repeat([piece.num_best for piece in pieces], lengths),
        )
        if found is None:
            return ()
        parts = zip(pieces, logprobs.split(found, lengths), strict=True)
        return tuple(PromptPieceLogprobs(piece.sequence_id, piece.first_position, part) for piece, part in parts)

    def compute_logprobs(self, hidden: Tensor, places: Array, token_ids: Array, num_best: Array) -> Logprobs | None:
        """Computes log probabilities of tokens [n] from the hidden rows at `places`, in parts: logits are large.

        Returns None if another rank has the logits.
        """
        most = self.max_prompt_rows
        parts: list[Logprobs] = []
        for start in range(0, len(places), most):
            some = slice(start, start + most)
            logits = self.chooser.whole(self.model.compute_logits(hidden[self._to_device(places[some])]))
            if logits is None:
                continue
            rows = np.arange(len(logits))
            parts.append(logprobs.of_tokens(self.backend.sampling, logits, rows, token_ids[some], num_best[some]))
        return logprobs.concatenate(parts) if parts else None

    @property
    def max_prompt_rows(self) -> int:
        """The number of prompt rows that get log probabilities at a time."""
        return max_prompt_rows(self.config.vocab_size)

    def _plan(self, forward_batch: ForwardBatch, block_size: int, lora: LoraRows | None) -> AttentionBatch:
        columns = forward_batch.num_new_tokens, forward_batch.seq_lens, forward_batch.block_tables
        layers = self.config.sliding_window, self.model.kv_groups.num_groups
        plan = self.backend.plan_attention(*columns, block_size, *layers, forward_batch.fixed_tables)
        return plan if lora is None else replace(plan, lora=lora)

    def _place(self, forward_batch: ForwardBatch) -> ForwardBatch:
        """Replaces virtual tokens by the ids of their slots' rows."""
        if not self._has_slots:
            return forward_batch
        layout, token_ids = forward_batch.layout, forward_batch.token_ids
        placed = self.slots.place(token_ids, layout.lora_ids, layout.num_new_tokens)
        return forward_batch if placed is token_ids else replace(forward_batch, token_ids=placed)

    def _lora_rows(self, layout: StepLayout) -> LoraRows | None:
        return self.slots.find_rows(layout.lora_ids, layout.num_new_tokens) if self._has_slots else None

    def _to_device(self, column: Array) -> Tensor:
        return upload(column, self.backend.device)

    def _synchronize(self) -> None:
        if self.backend.device.type == "cuda":
            torch.cuda.synchronize(self.backend.device)

    def prove_batch_invariance(self) -> bool:
        """Tests whether results are independent of the batch on this machine. Call it before the first step."""
        return self.model.probe()

    def fingerprint(self) -> str:
        return self.model.fingerprint(self._ranks)


def _nothing() -> None: ...
