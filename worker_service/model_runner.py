"""Runs the network on forward batches, and measures the worst step before there is a cache.

Owns the hand-over from rows (numpy) to the device (torch). Knows no messages, no states and no sequences' ids.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.ops import CaptureSizes, StepInputs
from worker_service.batch.chooser import Chooser
from worker_service.batch.row_requests import ROW
from worker_service.cache_engine import BlockFormat, allocate_pool
from worker_service.device.memory import read_peak_memory, reset_peak_memory
from worker_service.sampling import logprobs
from worker_service.sampling.sampler import Candidates, Sampled, SampleRows, sampling_bytes
from worker_service.sampling.sampling_state import SequenceLists, write_sampling
from worker_service.step import MAX_LOGPROBS, Logprobs, NewSequence, PromptLogprobs, SamplingParams, no_ids

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from kernels.collectives import Ranks
    from kernels.ops import CapturedStep
    from worker_service.batch.forward_batch import ForwardBatch, PromptPiece
    from worker_service.batch.input_batch import InputBatch
    from worker_service.batch.step_layout import StepLayout
    from worker_service.models.loader import LoadedModel
    from worker_service.step import Array

# A profile on a CPU computes what fits into this and scales it: memory of a step grows with its tokens and rows.
CPU_PROFILE_SECONDS = 0.5
CPU_PROFILE_TRIAL = 32
WARM_UP_TOKENS = 8
# How the count of threads is tried: decodes of so many sequences, so often, or for so long if a step takes its time,
# and what more threads must gain.
TRIAL_SEQUENCES = 8
NUM_TRIALS, MIN_TRIALS = 7, 2
MAX_TRIAL_SECONDS = 0.3
MIN_GAIN = 0.1
# A longer step is worth all threads: where a decode waits for memory it gains little from them, its prefills do.
SMALL_STEP_SECONDS = 1e-3
# Rows of prompts whose logits are made at a time, and their elements (16 MiB).
MAX_PROMPT_ROWS = 512
MAX_PROMPT_LOGITS = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class RunnerOutput:
    """The output of a step: sampled tokens, candidates of beams, log probabilities of prompts, and seconds."""

    sampled: Sampled = field(default_factory=Sampled)
    candidates: Candidates = field(default_factory=Candidates)
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0


def fewest_good_threads(seconds: Mapping[int, float]) -> int:
    """Chooses a number of threads by a step's seconds with each: more for a small step only if it gains a tenth."""
    chosen = min(seconds)
    if seconds[chosen] > SMALL_STEP_SECONDS:
        return max(seconds)
    for num_threads in sorted(seconds):
        if seconds[num_threads] < (1 - MIN_GAIN) * seconds[chosen]:
            chosen = num_threads
    return chosen


class ModelRunner:
    """One model on one device. Used by the device thread alone."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.config = loaded.config
        self._model = loaded.model
        self._backend = loaded.backend
        self._chooser = Chooser(self._backend, self.config.vocab_size)
        self._captured: CapturedStep | None = None
        self._ranks: Ranks | None = None
        # Logits and all that is made of them are the last stage's.
        self._has_head = loaded.model.share.is_last_stage

    def join(self, ranks: Ranks) -> None:
        """Sets the ranks of the network, from the next step on."""
        self._ranks = ranks
        self._backend.join(ranks)
        self._chooser.join(ranks.stage)

    def capture(self, kv_pool: Tensor, sizes: CaptureSizes) -> None:
        """Records the network over a pool, where the backend can: steps within these sizes need no Python then."""
        self._captured = self._model.capture(kv_pool, sizes)

    @torch.inference_mode()
    def run(self, forward_batch: ForwardBatch, batch: InputBatch, kv_pool: Tensor) -> RunnerOutput:
        """Computes a step's tokens and writes their KV; the last stage samples, or finds the candidates of beams."""
        started = time.perf_counter()
        layout, prompts = forward_batch.layout, forward_batch.prompts
        if not len(layout.rows):
            return RunnerOutput()
        due = np.concatenate([layout.sampled.last_hidden, layout.beams.last_hidden])
        if self._captured is not None and not prompts:
            columns = forward_batch.seq_lens, forward_batch.block_tables, forward_batch.token_ids
            inputs = StepInputs(layout.num_new_tokens, *columns, due)
            if self._captured.takes(inputs):
                return self._replay(self._captured, inputs, layout, batch, started)
        hidden = self._forward(forward_batch, batch.limits.block_size, kv_pool)
        if not self._has_head:
            self._synchronize()
            return RunnerOutput(forward_seconds=time.perf_counter() - started)
        logits = self._model.compute_logits(hidden[self._to_device(due)])
        self._synchronize()
        computed = time.perf_counter()
        sampled, candidates = self._chooser.choose(logits, layout, batch)
        # The rows of prompts need as much memory, so these go first.
        del logits
        prompt_logprobs = self._prompt_logprobs(prompts, hidden) if prompts else ()
        return RunnerOutput(sampled, candidates, prompt_logprobs, computed - started, time.perf_counter() - computed)

    def _replay(
        self, captured: CapturedStep, inputs: StepInputs, layout: StepLayout, batch: InputBatch, started: float
    ) -> RunnerOutput:
        """Computes a step without log probabilities of prompts; makes no logits where all rows are plain greedy."""
        is_plain = not len(layout.beams) and layout.sampled.is_plain_greedy
        outputs = captured.replay(inputs, with_logits=not is_plain)
        computed = time.perf_counter()
        if not self._has_head:
            return RunnerOutput(forward_seconds=computed - started)
        sampled, candidates = self._chooser.choose_replayed(outputs, layout, batch)
        return RunnerOutput(sampled, candidates, (), computed - started, time.perf_counter() - computed)

    def _prompt_logprobs(self, pieces: Sequence[PromptPiece], hidden: Tensor) -> tuple[PromptLogprobs, ...]:
        lengths = [len(piece.token_ids) for piece in pieces]
        places = [np.arange(piece.first_hidden, piece.first_hidden + len(piece.token_ids)) for piece in pieces]
        found = self._logprobs(
            hidden,
            np.concatenate(places),
            np.concatenate([piece.token_ids for piece in pieces]),
            np.repeat([piece.num_best for piece in pieces], lengths),
        )
        if found is None:
            return ()
        parts = zip(pieces, logprobs.split(found, lengths), strict=True)
        return tuple(PromptLogprobs(piece.sequence_id, piece.first_position, part) for piece, part in parts)

    def _logprobs(self, hidden: Tensor, places: Array, token_ids: Array, num_best: Array) -> Logprobs | None:
        """Computes log probabilities of tokens [n] from the hidden rows at `places`, in parts: logits are large.

        None where another rank has them.
        """
        most = self._max_prompt_rows()
        parts: list[Logprobs] = []
        for start in range(0, len(places), most):
            some = slice(start, start + most)
            logits = self._chooser.whole(self._model.compute_logits(hidden[self._to_device(places[some])]))
            if logits is None:
                continue
            rows = np.arange(len(logits))
            parts.append(logprobs.of_tokens(self._backend.sampling, logits, rows, token_ids[some], num_best[some]))
        return logprobs.concatenate(parts) if parts else None

    def _max_prompt_rows(self) -> int:
        return max(1, min(MAX_PROMPT_ROWS, MAX_PROMPT_LOGITS // self.config.vocab_size))

    def _forward(self, forward_batch: ForwardBatch, block_size: int, kv_pool: Tensor) -> Tensor:
        plan = self._backend.plan_attention(
            forward_batch.layout.num_new_tokens,
            forward_batch.seq_lens,
            forward_batch.block_tables,
            block_size,
            self.config.sliding_window,
        )
        return self._model.forward(self._to_device(forward_batch.token_ids), plan, kv_pool)

    def _to_device(self, column: Array) -> Tensor:
        return torch.from_numpy(column).to(self._backend.device)

    def _synchronize(self) -> None:
        if self._backend.device.type == "cuda":
            torch.cuda.synchronize(self._backend.device)

    def prove_batch_invariance(self) -> bool:
        """Tries whether results are independent of the batch on this machine. Call it before the first step."""
        return self._model.probe()

    def fingerprint(self) -> str:
        """Hashes what this machine computes for fixed tokens."""
        return self._model.fingerprint(self._ranks)

    @torch.inference_mode()
    def warm_up(self, kv_pool: Tensor, block_size: int, max_num_seqs: int) -> None:
        """Runs a prefill and decodes once, in the scratch block, so that the first request pays for nothing."""
        self._dry_step(kv_pool, block_size, num_sequences=1, num_tokens=min(WARM_UP_TOKENS, block_size))
        for num_sequences in {1, min(max_num_seqs, TRIAL_SEQUENCES)}:
            self._dry_decode(kv_pool, block_size, num_sequences)

    @torch.inference_mode()
    def settle_threads(self, kv_pool: Tensor, block_size: int, max_num_seqs: int) -> int:
        """Sets the calling thread's count of compute threads to 1, unless decodes gain from those it has; returns it.

        In a small model's step a second thread may cost more than it brings. Results do not depend on the count.
        """
        num_sequences = min(max_num_seqs, TRIAL_SEQUENCES)
        available, seconds = torch.get_num_threads(), dict[int, list[float]]()
        started = time.perf_counter()
        for trial in range(NUM_TRIALS):
            if trial >= MIN_TRIALS and time.perf_counter() - started > MAX_TRIAL_SECONDS:
                break
            for num_threads in {1, available}:
                self._backend.set_num_threads(num_threads)
                begin = time.perf_counter()
                self._dry_decode(kv_pool, block_size, num_sequences)
                seconds.setdefault(num_threads, []).append(time.perf_counter() - begin)
        # The best of each: what else ran on the machine made the others slower.
        chosen = fewest_good_threads({num_threads: min(times) for num_threads, times in seconds.items()})
        self._backend.set_num_threads(chosen)
        return chosen

    def _dry_decode(self, kv_pool: Tensor, block_size: int, num_sequences: int) -> None:
        """Decodes the first token of `num_sequences` sequences that all write to block 0."""
        if self._captured is None:
            self._dry_forward(kv_pool, block_size, num_sequences, num_sequences)
            return
        ones, zeros = np.ones(num_sequences, np.int64), np.zeros(num_sequences, np.int64)
        tables = np.zeros((num_sequences, 1), np.int32)
        self._captured.replay(StepInputs(ones, ones, tables, zeros, np.arange(num_sequences)), with_logits=False)

    @torch.inference_mode()
    def _dry_step(
        self, kv_pool: Tensor, block_size: int, *, num_sequences: int, num_tokens: int, num_prompt_rows: int = 0
    ) -> None:
        """Does a step of `num_tokens` whose sequences all write to block 0, with samples and log probabilities."""
        hidden, part = self._dry_forward(kv_pool, block_size, num_sequences, num_tokens)
        if part is None:
            return
        logits = self._chooser.whole(part)
        if logits is not None:
            self._chooser.sampler.sample(logits, worst_rows(num_sequences, self.config.vocab_size))
        del logits, part
        if num_prompt_rows:
            places = np.zeros(num_prompt_rows, np.int64)
            self._logprobs(hidden, places, places, places + min(MAX_LOGPROBS, self.config.vocab_size))

    def _dry_forward(
        self, kv_pool: Tensor, block_size: int, num_sequences: int, num_tokens: int
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the hidden rows, and the last stage's logits of each sequence's last."""
        lengths = np.full(num_sequences, num_tokens // num_sequences, np.int64)
        lengths[: num_tokens % num_sequences] += 1
        tables = np.zeros((num_sequences, -(-int(lengths.max()) // block_size)), np.int64)
        plan = self._backend.plan_attention(lengths, lengths, tables, block_size, self.config.sliding_window)
        token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=self._backend.device)
        hidden = self._model.forward(token_ids, plan, kv_pool)
        last = self._to_device(np.cumsum(lengths) - 1)
        return hidden, self._model.compute_logits(hidden[last]) if self._has_head else None

    def profile(self, block_size: int, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """Returns the most bytes that a step takes: all tokens and sequences allowed, each sampled.

        Measures them where they are not known.
        """
        num_sequences = min(max_num_seqs, max_num_batched_tokens)
        # Few sequences may be too short together for a step of all the tokens that the budget allows.
        num_tokens = min(max_num_batched_tokens, num_sequences * self.config.max_model_len)
        pool = allocate_pool(BlockFormat.of(self._model, block_size), 1, self._backend.device)
        if self._backend.device.type == "cuda":
            return self._profile_gpu(pool, block_size, num_tokens, num_sequences)
        sizes = CaptureSizes(max_num_batched_tokens, max_num_seqs, block_size, self.config.sliding_window)
        captured = self._model.capture(pool, sizes)
        if captured is not None:
            # What such a backend allocates is known: nothing need run. Prompts' log probabilities are never replayed.
            return captured.num_bytes + self._least_activation(num_tokens, num_sequences)
        return self._profile_cpu(pool, block_size, num_tokens, num_sequences)

    def _profile_gpu(self, pool: Tensor, block_size: int, num_tokens: int, num_sequences: int) -> int:
        device = self._backend.device
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        rows = min(self._max_prompt_rows(), num_tokens)
        self._dry_step(pool, block_size, num_sequences=num_sequences, num_tokens=num_tokens, num_prompt_rows=rows)
        peak = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
        return peak

    def _profile_cpu(self, pool: Tensor, block_size: int, num_tokens: int, num_sequences: int) -> int:
        """Measures a share of the worst step that takes half a second, and scales it; never less than what is known."""
        trial = min(CPU_PROFILE_TRIAL, num_tokens)
        started = time.perf_counter()
        self._dry_step(pool, block_size, num_sequences=min(trial, num_sequences), num_tokens=trial)
        seconds = time.perf_counter() - started
        share = min(1.0, CPU_PROFILE_SECONDS / max(seconds * num_tokens / trial, 1e-9))
        tokens = max(trial, int(num_tokens * share))
        can_reset = reset_peak_memory()
        before = read_peak_memory()
        rows = min(self._max_prompt_rows(), num_tokens)
        self._dry_step(
            pool,
            block_size,
            num_sequences=-(-num_sequences * tokens // num_tokens),
            num_tokens=tokens,
            num_prompt_rows=-(-rows * tokens // num_tokens),
        )
        measured = read_peak_memory() - before if can_reset else 0
        return max(int(measured * num_tokens / tokens), self._least_activation(num_tokens, num_sequences))

    def _least_activation(self, num_tokens: int, num_sequences: int) -> int:
        """Computes from sizes what a step holds at once: a layer's inner rows, logits and their working copies."""
        config = self.config
        row = 4 * config.hidden_size + 3 * config.intermediate_size
        ops, num_prompt_rows = self._backend.sampling, min(self._max_prompt_rows(), num_tokens)
        sampling = sampling_bytes(ops, num_sequences, config.vocab_size)
        prompts = logprobs.logprobs_bytes(ops, num_prompt_rows, config.vocab_size)
        return num_tokens * row * config.dtype.itemsize + max(sampling, prompts)


def worst_rows(num_rows: int, vocab_size: int) -> SampleRows:
    """Makes the rows that cost the sampler most: both filters, a top_k that needs the whole vocabulary, logprobs."""
    sampling = SamplingParams(top_k=vocab_size - 1, top_p=0.99, logprobs=MAX_LOGPROBS)
    sequence = NewSequence(0, 0, no_ids(), 0, 0, no_ids(), sampling)
    lists = SequenceLists(sequence, vocab_size)
    columns = np.zeros(num_rows, ROW)
    write_sampling(columns, sequence, lists, vocab_size)
    return SampleRows(columns, np.zeros(num_rows, np.int64), [lists] * num_rows, {})
