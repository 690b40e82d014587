"""Steps as CUDA graphs: one for each bucket of decodes, and of mixes of pieces and decodes.

A network's step of a small batch is hundreds of launches of a few microseconds each, about as long on the host as on
the device; replayed, it is one. A graph begins with what makes a step's inputs of the words that the host sends, and
ends with the hidden rows that logits are made of. The head is outside: logits are then made for the rows that a step
has, and one copy of them serves all graphs. Graphs share one pool of memory. They are captured from the largest to the
smallest for as long as the start may take, and after that when a step first needs them. Of each bucket there are two
where there are slots for LoRA adapters: steps without any launch nothing for them.

Only the steps of a network that one device computes are captured: ranks meet in collectives between the ops, those of
gloo run on the host, and what NCCL does in a capture has not been tried here. No graph has run on a GPU yet.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kernels.capture import StepInputs, StepOutputs
from kernels.cuda import elementwise
from kernels.cuda.inputs import Bucket, PaddedInputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from kernels.capture import CaptureSizes
    from kernels.ops import AttentionBatch

    Forward = Callable[[Tensor, AttentionBatch], Tensor]
    """From token ids [T] and a batch to hidden rows [T, hidden_size]."""

log = logging.getLogger(__name__)

# The largest graphs: beyond, a step is long enough to hide its launches.
MAX_SEQUENCES = 512
MAX_TOKENS = 2048
TOKEN_MULTIPLE = 64
# Sequences of mixes: padding costs them little, since it is not attended to.
MIXED_SEQUENCES = (8, 32, 128, 512)
# The most graphs of mixes: as many are reckoned with where blocks are counted.
MAX_MIXES = 48
# The time that a start may spend on capturing.
CAPTURE_SECONDS = 20.0


def padded_sizes(most: int) -> Iterator[int]:
    """Yields the numbers of sequences that decodes are captured for: the fewer, the closer together."""
    size = 1
    while size < min(most, MAX_SEQUENCES):
        yield size
        size += size if size < 8 else 8 if size < 64 else 16 if size < 256 else 32
    yield min(most, MAX_SEQUENCES)


class Buckets:
    """The buckets of steps within some sizes."""

    def __init__(self, sizes: CaptureSizes) -> None:
        self._decodes = [Bucket(size, size, 1) for size in padded_sizes(sizes.max_num_seqs)]
        # The first that has room for all sequences and one of padding, and those below.
        useful = 1 + sum(size <= sizes.max_num_seqs for size in MIXED_SEQUENCES)
        self._mixed_sequences = MIXED_SEQUENCES[:useful]
        self._most_tokens = min(MAX_TOKENS, sizes.max_num_tokens)
        self._widest = -(-sizes.max_length // sizes.block_size)
        self._has_slots = sizes.num_lora_slots > 0

    def first(self) -> list[Bucket]:
        """Returns those that are worth a capture before anybody asks, the largest first."""
        found = [*self._decodes, *(self._mix(num_seqs, self._most_tokens) for num_seqs in self._mixed_sequences)]
        if self._has_slots:
            found += [replace(bucket, has_loras=True) for bucket in found]
        return sorted(found, key=lambda bucket: (bucket.num_tokens, bucket.num_seqs, bucket.has_loras), reverse=True)

    def find(self, step: StepInputs) -> Bucket | None:
        """Returns the smallest that a step fits into."""
        found = self._find(step)
        return found if found is None or step.lora is None else replace(found, has_loras=True)

    def _find(self, step: StepInputs) -> Bucket | None:
        count, num_tokens, num_rows = len(step.num_new_tokens), len(step.token_ids), len(step.chosen)
        if not num_tokens or step.block_tables.shape[1] > self._widest:
            return None
        if num_tokens == count and (step.num_new_tokens == 1).all():
            return next((each for each in self._decodes if each.num_seqs >= max(count, num_rows)), None)
        # One sequence has the padding.
        num_seqs = next((size for size in self._mixed_sequences if size >= max(count + 1, num_rows)), None)
        if num_seqs is None or num_tokens > self._most_tokens:
            return None
        return self._mix(num_seqs, num_tokens)

    @staticmethod
    def _mix(num_seqs: int, num_tokens: int) -> Bucket:
        padded = -(-num_tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
        return Bucket(num_seqs, padded, padded)


class Recording:
    """Recorded work: its output, and a function that repeats it."""

    def __init__(self, work: Callable[[], Tensor], pool: Any) -> None:
        """Runs the work once, which compiles its kernels, and records it. `pool`: the memory pool of all recordings."""
        work()
        self._graph = torch.cuda.CUDAGraph()
        # gRPC's threads may touch the device meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.output = work()

    def replay(self) -> None:
        """Enqueues the work, which overwrites the output."""
        self._graph.replay()


class CapturedSteps:
    """See `kernels.ops.CapturedStep`. Logits are always made."""

    def __init__(
        self,
        forward: Forward,
        to_logits: Callable[[Tensor], Tensor],
        sizes: CaptureSizes,
        device: torch.device,
        record: Callable[[Callable[[], Tensor], Any], Recording] = Recording,
    ) -> None:
        """Captures nothing yet.

        Args:
            forward: the network, but for its head.
            to_logits: the head: from hidden rows [R, hidden_size] to logits [R, vocabulary].
            sizes: of the largest steps.
            device: what computes.
            record: makes a recording of some work, in a pool.
        """
        self._forward = forward
        self._to_logits = to_logits
        self._sizes = sizes
        self._device = device
        self._record = record
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._buckets = Buckets(sizes)
        self._captured: dict[Bucket, tuple[PaddedInputs, Recording]] = {}
        self.num_bytes = 0

    def capture_ahead(self, seconds: float = CAPTURE_SECONDS) -> None:
        """Captures the buckets that are worth it, the largest first, for so long."""
        begin, buckets = time.perf_counter(), self._buckets.first()
        for bucket in buckets:
            if time.perf_counter() - begin > seconds:
                break
            self._find(bucket)
        spent = time.perf_counter() - begin
        log.info("%d of %d graphs captured in %.1f s", len(self._captured), len(buckets), spent)

    def estimate(self) -> None:
        """Captures the two largest, and sets `num_bytes` to what all would take that may ever be captured.

        The largest takes what it shares with the others. Those take their own inputs and outputs, which are known, and
        what the driver keeps of a graph: as much as the second largest takes beyond its own.
        """
        largest, second, *others = self._buckets.first()
        shared = self._measure(largest)
        kept_by_driver = max(0, self._measure(second) - self._own_bytes(second))
        num_mixes = sum(bucket.max_new_tokens > 1 for bucket in self._buckets.first())
        others += [largest] * (MAX_MIXES - num_mixes)
        self.num_bytes = shared + sum(self._own_bytes(bucket) + kept_by_driver for bucket in (second, *others))

    def _measure(self, bucket: Bucket) -> int:
        before = self.num_bytes
        self._find(bucket)
        return self.num_bytes - before

    def _own_bytes(self, bucket: Bucket) -> int:
        """Counts what a graph shares with no other: its inputs, in words of 4 bytes, and its output."""
        output = next(iter(self._captured.values()))[1].output
        return 4 * bucket.num_words(self._sizes) + bucket.num_seqs * output[:1].nbytes

    def takes(self, step: StepInputs) -> bool:
        """Returns whether there is a graph for the step, or may be one: the rest are computed op by op."""
        bucket = self._buckets.find(step)
        if bucket is None or bucket in self._captured or bucket.max_new_tokens == 1:
            return bucket is not None
        return sum(each.max_new_tokens > 1 for each in self._captured) < MAX_MIXES

    def replay(self, step: StepInputs, *, with_logits: bool) -> StepOutputs:
        bucket = self._buckets.find(step)
        assert bucket is not None
        inputs, recording = self._find(bucket)
        inputs.fill(step)
        recording.replay()
        return StepOutputs(None, None, None, self._to_logits(recording.output[: len(step.chosen)]))

    def _find(self, bucket: Bucket) -> tuple[PaddedInputs, Recording]:
        if bucket not in self._captured:
            before = taken_bytes(self._device)
            inputs = PaddedInputs(bucket, self._sizes, self._device)
            recording = self._record(lambda: self._compute(inputs), self._pool)
            self.num_bytes += max(each - then for each, then in zip(taken_bytes(self._device), before, strict=True))
            self._captured[bucket] = inputs, recording
        return self._captured[bucket]

    def _compute(self, inputs: PaddedInputs) -> Tensor:
        """Computes the hidden rows [S, hidden_size] that are chosen."""
        return elementwise.embedding(inputs.chosen, self._forward(*inputs.unpack()))


def taken_bytes(device: torch.device) -> tuple[int, int]:
    """Counts the bytes that torch has taken of a GPU, and those that are not free: what the driver takes among them.

    The larger of their growths is told: of what is free, a neighbour may give back or take.
    """
    if device.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.memory_reserved(device), total - free
