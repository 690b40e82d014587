"""Stage `steps` of benchmarks/gpu_day.sh: whole steps of the Llama-8B shape with random weights made on the device.

A step is what a worker launches: the forward pass, as a graph up to 2048 tokens, the logits, and the likeliest token of
each sequence, which goes to the host; two steps are in flight. Lines with a word behind them leave one thing out, or
keep a row's bits. What the machine could do at best is the longer of two: a step's bytes, weights and keys and values,
at the copy bandwidth; its products at the matrix rate.
"""

from __future__ import annotations

import gc
import time
from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from benchmarks.gpu.machine import name_of
from benchmarks.gpu.shapes import BLOCK_SIZE, block_tables, greedy, shape
from benchmarks.gpu.stage import Stage, start
from blockyard_kernels.capture import CaptureSizes, StepInputs
from blockyard_kernels.cuda.backend import CudaBackend
from blockyard_kernels.invariance import random_numbers
from blockyard_kernels.launching import upload
from blockyard_kernels.lora import LoraRows
from blockyard_kernels.ops import kv_pool_shape
from tests.kit.kernels.strict_graphs import StrictRecording
from tests.kit.kernels.triton_interpreter import IS_INTERPRETED
from worker_service.lora.reader import find_sites
from worker_service.models.builder import build_decoder
from worker_service.models.random_weights import RandomWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from blockyard_kernels.capture import CapturedStep
    from blockyard_kernels.cuda.linear import CudaLinear
    from blockyard_kernels.launching import Launched

# Of what the device has left, so that a step and graphs have room.
POOL_SHARE = 0.7
# Slots of adapters, and their rank.
ADAPTERS = 8, 16
# Steps of a profile.
PROFILED = 20


class Pipeline:
    """Launches steps, and waits for the oldest where as many as may be are in flight."""

    def __init__(self, backend: CudaBackend, depth: int) -> None:
        self._backend = backend
        self._depth = depth
        self._open: deque[Launched] = deque()

    def step(self, work: Callable[[], tuple[Tensor, ...]]) -> None:
        """Launches a step."""
        self._open.append(self._backend.launcher.launch(work))
        while len(self._open) >= self._depth:
            self._open.popleft().wait()


class Steps:
    """The model on one backend, and a pool for the largest of the steps that fit."""

    def __init__(self, stage: Stage, backend: CudaBackend, mode: str, longest: Sequence[Sequence[int]]) -> None:
        """`mode`: what lines are called behind their names; `longest`: lengths of the steps that need most blocks."""
        config = shape(is_dry=stage.is_dry)
        self._stage, self._backend, self._mode = stage, backend, mode
        begin = time.perf_counter()
        weights = RandomWeights(config, stage.device, lambda done_bytes, total_bytes: None)
        self.model = build_decoder(config, backend, weights)
        stage.synchronize()
        stage.keep(f"load{mode}", {"seconds": time.perf_counter() - begin})
        self._num_parameters = weights.num_elements - config.vocab_size * config.hidden_size
        # Graphs read the table of positions where it lies: it grows no more.
        self.model.reserve_positions(max(max(lengths) for lengths in longest))
        self._pool = self._make_pool(max(block_tables(lengths)[-1][-1] + 1 for lengths in longest))
        self._captured: CapturedStep | None = None

    def probe(self) -> None:
        """Has the backend try which products keep a row's bits, and keeps how they are made."""
        begin, linears = time.perf_counter(), cast("list[CudaLinear]", self.model._linears())
        # To interpret more would take half a minute.
        is_invariant = self._backend.probe(linears[:1] if IS_INTERPRETED else linears, self.model._shape)
        ways = Counter(f"{linear.way.method} from {linear.way.min_rows} rows" for linear in linears)
        self._stage.keep(f"probe{self._mode}", {"seconds": time.perf_counter() - begin})
        self._stage.keep("products", {"batch_invariant": is_invariant, **ways})

    def capture(self, max_num_tokens: int, max_num_seqs: int, max_length: int, num_lora_slots: int = 0) -> None:
        """Makes graphs of steps up to a size."""
        if IS_INTERPRETED:
            self._backend.record = cast("Any", StrictRecording)
        begin = time.perf_counter()
        sizes = CaptureSizes(
            max_num_tokens, max_num_seqs, BLOCK_SIZE, max_length=max_length, num_lora_slots=num_lora_slots
        )
        # Of what was captured before the memory is given back.
        self._captured = None
        self._captured = self.model.capture(self._pool, sizes)
        self._stage.synchronize()
        mode = f", {num_lora_slots} slots" if num_lora_slots else self._mode
        self._stage.keep(f"capture{mode}", {"seconds": time.perf_counter() - begin})

    def adapt(self, num_slots: int, rank: int) -> None:
        """Makes slots for adapters, and brings one of random numbers into each."""
        ops = self._backend.lora
        for site in find_sites(self.model):
            weight, width = cast("CudaLinear", site.packed), rank * len(site.modules)
            ops.make_room(weight, num_slots, width)
            inner, outer = (width, weight.in_features), (len(weight.weight), width)
            packed = ops.pack(weight, *(random_numbers(*sizes, seed=1) / 64 for sizes in (inner, outer)))
            for slot in range(num_slots):
                ops.write(weight, slot, packed)

    def _make_pool(self, num_blocks: int) -> Tensor:
        config, device = self.model.config, self._stage.device
        sizes = kv_pool_shape(1, config.num_layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            block_bytes = torch.empty(sizes, dtype=config.dtype, device="meta").nbytes
            num_blocks = min(num_blocks, int(POOL_SHARE * torch.cuda.mem_get_info(device)[0]) // block_bytes)
        return torch.zeros(num_blocks, *sizes[1:], dtype=config.dtype, device=device)

    def measure(
        self,
        name: str,
        num_new: Sequence[int],
        lengths: Sequence[int],
        *,
        graphs: bool = True,
        depth: int = 2,
        lora: LoraRows | None = None,
    ) -> None:
        """Times one kind of step."""
        config, tables = self.model.config, block_tables(lengths)
        if tables[-1][-1] >= len(self._pool):
            self._stage.keep(name + self._mode, {"error": "the blocks do not fit into this device's memory"})
            return
        token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * config.dtype.itemsize
        seen = sum(new * length - new * (new - 1) / 2 for new, length in zip(num_new, lengths, strict=True))
        flops = 2.0 * sum(num_new) * self._num_parameters
        flops += 4.0 * seen * config.num_layers * config.num_heads * config.head_dim
        num_bytes = self.model.parameter_bytes + sum(lengths) * token_bytes
        pipeline, work = Pipeline(self._backend, depth), self._work(num_new, lengths, graphs=graphs, lora=lora)
        rate = torch.int8 if self._mode == ", int8" else config.dtype
        self._stage.measure(
            name + self._mode, lambda: pipeline.step(work), {"bandwidth": num_bytes, name_of(rate): flops}
        )

    def _work(
        self, num_new: Sequence[int], lengths: Sequence[int], *, graphs: bool, lora: LoraRows | None = None
    ) -> Callable[[], tuple[Tensor, ...]]:
        """Returns what computes a step."""
        tables = block_tables(lengths)
        padded = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        counts = np.asarray(num_new, np.int64)
        token_ids = np.arange(sum(num_new)) % self.model.config.vocab_size
        step = StepInputs(counts, np.asarray(lengths, np.int64), padded, token_ids, counts.cumsum() - 1, lora=lora)
        choices, captured = greedy(len(num_new)), self._captured

        def work() -> tuple[Tensor, ...]:
            if graphs and captured is not None and captured.takes(step):
                logits = captured.replay(step, with_logits=True).logits
                assert logits is not None
            else:
                logits = self._compute(step)
            sampling = self._backend.sampling
            return sampling.launch_choose(logits, choices), sampling.launch_finite_rows(logits)

        return work

    def _compute(self, step: StepInputs) -> Tensor:
        """Computes logits op by op."""
        backend, device, window = self._backend, self._backend.device, self.model.config.sliding_window
        batch = backend.plan_attention(step.num_new_tokens, step.seq_lens, step.block_tables, BLOCK_SIZE, window)
        batch = replace(batch, lora=step.lora)
        hidden = self.model.forward(upload(cast("Any", step.token_ids), device), batch, self._pool)
        return self.model.compute_logits(hidden[upload(step.chosen, device)])

    def profile(self, name: str, num_new: Sequence[int], lengths: Sequence[int]) -> None:
        """Keeps how long the device does nothing between two steps, read from a profile."""
        if self._stage.device.type != "cuda" or block_tables(lengths)[-1][-1] >= len(self._pool):
            return
        pipeline, work = Pipeline(self._backend, 2), self._work(num_new, lengths, graphs=True)
        pipeline.step(work)
        activity = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profiler:
            for _ in range(PROFILED):
                pipeline.step(work)
            self._stage.synchronize()
        spans = [
            (event.time_range.start / 1e6, event.time_range.end / 1e6)
            for event in profiler.events() or []
            if event.device_type.name == "CUDA"
        ]
        self._stage.keep(f"idle between steps of {name}{self._mode}", idle_between(spans, PROFILED))


def idle_between(spans: Iterable[tuple[float, float]], num_steps: int) -> dict[str, float]:
    """Finds when a device did nothing.

    Args:
        spans: begin and end of each of its works in seconds; they may overlap.
        num_steps: that they are of, one after another.

    Returns:
        `seconds`: the median of as many of the longest pauses as there are changes from one step to the next. Pauses
        within a step are among them only where those between steps are shorter. `busy_share`: of the time from the
        first work to the last.
    """
    ordered = sorted(spans)
    if not ordered:
        return {"seconds": 0.0, "busy_share": 0.0}
    begin, end = ordered[0]
    pauses: list[float] = []
    for start_of, end_of in ordered[1:]:
        if start_of > end:
            pauses.append(start_of - end)
        end = max(end, end_of)
    longest = sorted(pauses, reverse=True)[: num_steps - 1]
    longest += [0.0] * (num_steps - 1 - len(longest))
    busy = 1 - sum(pauses) / (end - begin) if end > begin else 1.0
    return {"seconds": float(np.median(longest)) if longest else 0.0, "busy_share": busy}


def with_adapters(steps: Steps, batches: Sequence[int], context: int) -> None:
    """Times decodes in which no row has an adapter, and in which each slot's adapter has as many rows."""
    num_slots, rank = ADAPTERS
    steps.adapt(num_slots, rank)
    steps.capture(batches[-1], batches[-1], context, num_slots)
    for batch in batches:
        name, lengths = f"decode {batch} x {context}", [context] * batch
        steps.measure(f"{name}, slots and no adapter", [1] * batch, lengths)
        lora = LoraRows((np.arange(batch) % num_slots).astype(np.int32))
        steps.measure(f"{name}, {num_slots} adapters of rank {rank}", [1] * batch, lengths, lora=lora)


def main() -> None:
    """Times everything, what matters most first."""
    stage = start(__doc__)
    context, batches, prompts = (20, (2,), (12,)) if stage.is_dry else (1024, (1, 8, 64, 256), (2048, 8192))
    longest = [context] * batches[-1], [prompts[-1]]
    ablated = batches[len(batches) // 2]
    modes = {
        "": CudaBackend(stage.device),
        ", invariant": CudaBackend(stage.device, invariant=True),
        ", int8": CudaBackend(stage.device, quantization="int8"),
    }
    for mode, backend in list(modes.items())[: 2 if stage.is_dry else None]:
        steps = Steps(stage, backend, mode, longest)
        if mode == ", invariant":
            steps.probe()
        steps.capture(batches[-1] if stage.is_dry else prompts[0], batches[-1], max(context, prompts[0]))
        for batch in batches:
            steps.measure(f"decode {batch} x {context}", [1] * batch, [context] * batch)
        for length in prompts:
            steps.measure(f"prefill {length}", [length], [length])
        if not mode:
            steps.profile(f"decode {ablated} x {context}", [1] * ablated, [context] * ablated)
            for batch in sorted({batches[0], ablated}):
                name, lengths = f"decode {batch} x {context}", [context] * batch
                steps.measure(f"{name}, one at a time", [1] * batch, lengths, depth=1)
                steps.measure(f"{name}, no graphs", [1] * batch, lengths, graphs=False)
            with_adapters(steps, batches[:-1] or batches, context)
        del steps
        gc.collect()
        if stage.device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
