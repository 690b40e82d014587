"""Dry steps in block 0 before the first request: to measure the largest step, warm up, and choose the threads.

Knows no states.
"""

from __future__ import annotations

import gc
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from blockyard.capacity.steps import SamplingScratch, StepSize, least_step_bytes
from blockyard_kernels.capture import CaptureSizes, StepInputs
from blockyard_kernels.launching import upload
from blockyard_kernels.lora import LoraRows
from worker_service.cache_engine import BlockFormat, allocate_pool
from worker_service.device.memory import read_peak_memory, reset_peak_memory
from worker_service.sampling.sampler import worst_rows
from worker_service.step import MAX_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt
    from torch import Tensor

    from blockyard.contract.workers import CachePlan
    from worker_service.runner.model_runner import ModelRunner

# A profile on a CPU computes as much as this time allows and scales it: a step's memory grows with tokens and rows.
CPU_PROFILE_SECONDS = 0.5
CPU_PROFILE_TRIAL = 32
WARM_UP_TOKENS = 8
# The trial of a thread count: the number of sequences that decode, the numbers of trials, their longest time, and the
# gain that justifies more threads.
TRIAL_SEQUENCES = 8
NUM_TRIALS, MIN_TRIALS = 7, 2
MAX_TRIAL_SECONDS = 0.3
MIN_GAIN = 0.1
# The numbers of rows of which decodes are measured, of each the most trials, and their longest time.
DECODE_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32)
DECODE_TRIALS = 10
MAX_DECODE_SECONDS = 0.2
# A longer step gets all threads: a decode that waits for memory gains little from them, but prefills do.
SMALL_STEP_SECONDS = 1e-3
# A step that takes this long even once is not small, whatever else ran meanwhile.
LONG_STEP_SECONDS = 20e-3


def fewest_good_threads(seconds: Mapping[int, float]) -> int:
    """Chooses a number of threads by a step's seconds with each: more for a small step only if it gains a tenth."""
    chosen = min(seconds)
    if seconds[chosen] > SMALL_STEP_SECONDS:
        return max(seconds)
    for num_threads in sorted(seconds):
        if seconds[num_threads] < (1 - MIN_GAIN) * seconds[chosen]:
            chosen = num_threads
    return chosen


def has_tried_enough(best: Mapping[int, float], num_trials: int, elapsed_seconds: float) -> bool:
    """Returns whether more trials cannot change the choice or take too long. `best`: seconds of a step by threads."""
    if num_trials >= NUM_TRIALS or (num_trials >= MIN_TRIALS and elapsed_seconds > MAX_TRIAL_SECONDS):
        return True
    return num_trials > 0 and min(best.values()) > LONG_STEP_SECONDS


@torch.inference_mode()
def dry_decode(runner: ModelRunner, kv_pool: Tensor, block_size: int, num_sequences: int) -> None:
    """Decodes the first token of `num_sequences` sequences that all write to block 0."""
    if runner.captured is None:
        _dry_forward(runner, kv_pool, block_size, num_sequences, num_sequences)
        return
    ones, zeros = np.ones(num_sequences, np.int64), np.zeros(num_sequences, np.int64)
    tables = np.zeros((runner.model.kv_groups.num_groups * num_sequences, 1), np.int32)
    chosen, fixed_tables = np.arange(num_sequences), _fixed_tables(runner, kv_pool, num_sequences)
    inputs = StepInputs(ones, ones, tables, zeros, chosen, fixed_tables=fixed_tables)
    runner.captured.replay(inputs, with_logits=False)


def _fixed_tables(runner: ModelRunner, kv_pool: Tensor, num_sequences: int) -> npt.NDArray[np.int32] | None:
    """Returns the fixed blocks of sequences whose states all lie in block 0; None: the layers have no state."""
    num_blocks = runner.model.count_state_blocks(kv_pool[0].numel() * kv_pool.itemsize)
    return np.zeros((num_sequences, num_blocks), np.int32) if num_blocks else None


@torch.inference_mode()
def dry_step(
    runner: ModelRunner,
    kv_pool: Tensor,
    block_size: int,
    *,
    num_sequences: int,
    num_tokens: int,
    num_prompt_rows: int = 0,
) -> None:
    """Runs a step of `num_tokens` whose sequences all write to block 0, with samples and log probabilities."""
    hidden, part = _dry_forward(runner, kv_pool, block_size, num_sequences, num_tokens)
    if part is None:
        return
    vocab_size, chooser = runner.config.vocab_size, runner.chooser
    logits = chooser.whole(part)
    if logits is not None:
        chooser.sampler.sample(logits, worst_rows(num_sequences, vocab_size))
    del logits, part
    if num_prompt_rows:
        places = np.zeros(num_prompt_rows, np.int64)
        runner.compute_logprobs(hidden, places, places, places + min(MAX_LOGPROBS, vocab_size))


def _dry_forward(
    runner: ModelRunner, kv_pool: Tensor, block_size: int, num_sequences: int, num_tokens: int
) -> tuple[Tensor, Tensor | None]:
    """Returns the hidden rows, and the last stage's logits of each sequence's last row."""
    lengths = np.full(num_sequences, num_tokens // num_sequences, np.int64)
    lengths[: num_tokens % num_sequences] += 1
    model, backend, num_groups = runner.model, runner.backend, runner.model.kv_groups.num_groups
    tables = np.zeros((num_groups * num_sequences, -(-int(lengths.max()) // block_size)), np.int64)
    window = runner.config.sliding_window
    fixed_tables = _fixed_tables(runner, kv_pool, num_sequences)
    plan = backend.plan_attention(lengths, lengths, tables, block_size, window, num_groups, fixed_tables)
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=backend.device)
    if len(runner.slots):
        # All slots are used; their contents do not matter.
        plan = replace(plan, lora=LoraRows((np.arange(num_tokens) % len(runner.slots)).astype(np.int32)))
    hidden = model.forward(token_ids, plan, kv_pool)
    last = upload(np.cumsum(lengths) - 1, backend.device)
    return hidden, model.compute_logits(hidden[last]) if runner.has_head else None


@torch.inference_mode()
def warm_up(runner: ModelRunner, kv_pool: Tensor, block_size: int, max_num_seqs: int) -> None:
    """Runs a prefill and decodes once, in block 0, so that the first request does not pay for one-time costs."""
    dry_step(runner, kv_pool, block_size, num_sequences=1, num_tokens=min(WARM_UP_TOKENS, block_size))
    for num_sequences in {1, min(max_num_seqs, TRIAL_SEQUENCES)}:
        dry_decode(runner, kv_pool, block_size, num_sequences)


@torch.inference_mode()
def settle_threads(runner: ModelRunner, kv_pool: Tensor, block_size: int, max_num_seqs: int) -> int:
    """Sets the calling thread's number of compute threads to 1, unless decodes gain from more; returns the number.

    In a small model's step a second thread may cost more than it brings. Results do not depend on the count.
    """
    num_sequences = min(max_num_seqs, TRIAL_SEQUENCES)
    available, best = torch.get_num_threads(), dict[int, float]()
    started, num_trials = time.perf_counter(), 0
    while not has_tried_enough(best, num_trials, time.perf_counter() - started):
        for num_threads in {1, available}:
            runner.backend.set_num_threads(num_threads)
            begin = time.perf_counter()
            dry_decode(runner, kv_pool, block_size, num_sequences)
            # The best time of each count: slower times come from other load on the machine.
            best[num_threads] = min(best.get(num_threads, math.inf), time.perf_counter() - begin)
        num_trials += 1
    chosen = fewest_good_threads(best)
    runner.backend.set_num_threads(chosen)
    return chosen


@torch.inference_mode()
def measure_decodes(runner: ModelRunner, kv_pool: Tensor, plan: CachePlan) -> dict[int, float]:
    """Measures steps of decodes: for each of some numbers of rows the seconds of the fastest one.

    They are the scheduler's first guess at what a row more costs; it goes on by what it sees.
    """
    seconds: dict[int, float] = {}
    most_rows = min(plan.max_num_seqs + plan.max_draft_rows, plan.max_num_batched_tokens)
    for num_rows in (each for each in DECODE_ROWS if each <= most_rows):
        started, num_trials, best = time.perf_counter(), 0, math.inf
        while num_trials < MIN_TRIALS or (
            num_trials < DECODE_TRIALS and time.perf_counter() - started < MAX_DECODE_SECONDS
        ):
            begin = time.perf_counter()
            dry_decode(runner, kv_pool, plan.block_size, num_rows)
            best, num_trials = min(best, time.perf_counter() - begin), num_trials + 1
        seconds[num_rows] = best
    return seconds


def profile(runner: ModelRunner, block_size: int, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Returns the peak memory in bytes of the largest step, with all allowed tokens and sequences, all sampled.

    It is measured if the backend does not know it.
    """
    size = StepSize.largest(max_num_batched_tokens, max_num_seqs, runner.config.max_model_len)
    num_tokens, num_sequences = size.num_tokens, size.num_sequences
    pool = allocate_pool(BlockFormat.of(runner.model, block_size), 1, runner.backend.device)
    if runner.backend.device.type == "cuda":
        return _profile_gpu(runner, pool, block_size, num_tokens, num_sequences)
    sizes = CaptureSizes(max_num_batched_tokens, max_num_seqs, block_size, runner.config.sliding_window)
    captured = runner.model.capture(pool, sizes)
    if captured is not None:
        # A backend with captured steps knows its allocations, so no step need run. Log probabilities of prompts are
        # never part of a captured step.
        return captured.num_bytes + _least_activation(runner, num_tokens, num_sequences)
    return _profile_cpu(runner, pool, block_size, num_tokens, num_sequences)


def _profile_gpu(runner: ModelRunner, pool: Tensor, block_size: int, num_tokens: int, num_sequences: int) -> int:
    device, config = runner.backend.device, runner.config
    sizes = CaptureSizes(
        num_tokens,
        num_sequences,
        block_size,
        config.sliding_window,
        config.max_model_len,
        num_lora_slots=len(runner.slots),
        is_trial=True,
    )
    runner.model.reserve_positions(config.max_model_len)
    captured = runner.model.capture(pool, sizes)
    graph_bytes = captured.num_bytes if captured is not None else 0
    # A trial gives its memory back.
    del captured
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    rows = min(runner.max_prompt_rows, num_tokens)
    dry_step(runner, pool, block_size, num_sequences=num_sequences, num_tokens=num_tokens, num_prompt_rows=rows)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak + graph_bytes


def _profile_cpu(runner: ModelRunner, pool: Tensor, block_size: int, num_tokens: int, num_sequences: int) -> int:
    """Measures a part of the worst step that takes half a second, and scales it; at least the known minimum."""
    trial = min(CPU_PROFILE_TRIAL, num_tokens)
    started = time.perf_counter()
    dry_step(runner, pool, block_size, num_sequences=min(trial, num_sequences), num_tokens=trial)
    seconds = time.perf_counter() - started
    share = min(1.0, CPU_PROFILE_SECONDS / max(seconds * num_tokens / trial, 1e-9))
    tokens = max(trial, int(num_tokens * share))
    can_reset = reset_peak_memory()
    before = read_peak_memory()
    rows = min(runner.max_prompt_rows, num_tokens)
    dry_step(
        runner,
        pool,
        block_size,
        num_sequences=-(-num_sequences * tokens // num_tokens),
        num_tokens=tokens,
        num_prompt_rows=-(-rows * tokens // num_tokens),
    )
    measured = read_peak_memory() - before if can_reset else 0
    return max(int(measured * num_tokens / tokens), _least_activation(runner, num_tokens, num_sequences))


def _least_activation(runner: ModelRunner, num_tokens: int, num_sequences: int) -> int:
    ops = runner.backend.sampling
    scratch = SamplingScratch(ops.choose_bytes, ops.token_logprobs_bytes)
    return least_step_bytes(runner.config, StepSize(num_tokens, num_sequences), scratch)
