"""Steps as CUDA graphs: one graph for each bucket of decodes, and for each bucket of mixed prefill pieces and decodes.

A step of a small batch has hundreds of launches of a few microseconds each, which take the host about as long as the
device; a replayed graph is a single launch. A graph starts with a kernel that unpacks the step's inputs from the words
that the host sends, and ends with the hidden rows whose logits are needed. The LM head is not part of the graph: it
computes logits only for the rows of the step, and all graphs share one buffer of logits. Graphs share one memory pool.
They are captured at start from the largest to the smallest within a time limit, and later when a step first needs one.
With LoRA slots each bucket has two graphs, so that steps without adapters launch no kernels for them.

Only networks on a single device are captured. With several ranks there are collectives between the ops: gloo runs on
the host, and NCCL within a capture has not been tested here. No graph has run on a GPU yet.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from blockyard_kernels.capture import CaptureSizes, StepInputs, StepOutputs
from blockyard_kernels.cuda import elementwise
from blockyard_kernels.cuda.inputs import Bucket, PaddedInputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from blockyard_kernels.ops import AttentionBatch

    Forward = Callable[[Tensor, AttentionBatch], Tensor]
    """From token ids [T] and a batch to hidden rows [T, hidden_size]."""

log = logging.getLogger(__name__)

# The sizes of the largest graphs: a larger step takes long enough to hide its launches.
MAX_SEQUENCES = 512
MAX_TOKENS = 2048
TOKEN_MULTIPLE = 64
# Numbers of sequences of mixed buckets. Padded sequences cost little, since attention skips them.
MIXED_SEQUENCES = (8, 32, 128, 512)
# The most graphs of mixed buckets. The memory estimate, from which KV blocks are counted, assumes this many.
MAX_MIXES = 48
# The time that a start may spend on capturing.
CAPTURE_SECONDS = 20.0


def padded_sizes(most: int) -> Iterator[int]:
    """Yields the numbers of sequences for which decodes are captured: small numbers are closer together."""
    size = 1
    while size < min(most, MAX_SEQUENCES):
        yield size
        size += size if size < 8 else 8 if size < 64 else 16 if size < 256 else 32
    yield min(most, MAX_SEQUENCES)


class Buckets:
    """The buckets of steps up to the captured sizes."""

    def __init__(self, sizes: CaptureSizes) -> None:
        self._decodes = [Bucket(size, size, 1) for size in padded_sizes(sizes.max_num_seqs)]
        # The first number of sequences with room for all sequences and one of padding, and all smaller ones.
        useful = 1 + sum(size <= sizes.max_num_seqs for size in MIXED_SEQUENCES)
        self._mixed_sequences = MIXED_SEQUENCES[:useful]
        self._most_tokens = min(MAX_TOKENS, sizes.max_num_tokens)
        self._widest = -(-sizes.max_length // sizes.block_size)
        self._has_slots = sizes.num_lora_slots > 0

    def first(self) -> list[Bucket]:
        """Returns the buckets to capture at start, the largest first."""
        found = [*self._decodes, *(self._mix(num_seqs, self._most_tokens) for num_seqs in self._mixed_sequences)]
        if self._has_slots:
            found += [replace(bucket, has_loras=True) for bucket in found]
        return sorted(found, key=lambda bucket: (bucket.num_tokens, bucket.num_seqs, bucket.has_loras), reverse=True)

    def find(self, step: StepInputs) -> Bucket | None:
        """Returns the smallest bucket into which a step fits, or None."""
        found = self._find(step)
        return found if found is None or step.lora is None else replace(found, has_loras=True)

    def _find(self, step: StepInputs) -> Bucket | None:
        count, num_tokens, num_rows = len(step.num_new_tokens), len(step.token_ids), len(step.chosen)
        if not num_tokens or step.block_tables.shape[1] > self._widest:
            return None
        if num_tokens == count and (step.num_new_tokens == 1).all():
            return next((each for each in self._decodes if each.num_seqs >= max(count, num_rows)), None)
        # One more sequence holds the padding tokens.
        num_seqs = next((size for size in self._mixed_sequences if size >= max(count + 1, num_rows)), None)
        if num_seqs is None or num_tokens > self._most_tokens:
            return None
        return self._mix(num_seqs, num_tokens)

    @staticmethod
    def _mix(num_seqs: int, num_tokens: int) -> Bucket:
        padded = -(-num_tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
        return Bucket(num_seqs, padded, padded)


class Recording:
    """Recorded work as a CUDA graph, with its output."""

    def __init__(self, work: Callable[[], Tensor], pool: Any) -> None:
        """Runs the work once, which compiles its kernels, then records it. `pool`: memory shared by all recordings."""
        work()
        self._graph = torch.cuda.CUDAGraph()
        # gRPC threads may use the device during the capture.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.output = work()

    def replay(self) -> None:
        """Enqueues the work, which overwrites the output."""
        self._graph.replay()


class CapturedSteps:
    """See `blockyard_kernels.capture.CapturedStep`. Logits are always computed."""

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
            forward: the network without its LM head.
            to_logits: the LM head: from hidden rows [R, hidden_size] to logits [R, vocabulary].
            sizes: the sizes of the largest step.
            device: the device to compute on.
            record: makes a recording of some work, in a memory pool.
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
        """Captures the buckets of `Buckets.first`, the largest first, until `seconds` have passed."""
        begin, buckets = time.perf_counter(), self._buckets.first()
        for bucket in buckets:
            if time.perf_counter() - begin > seconds:
                break
            self._find(bucket)
        spent = time.perf_counter() - begin
        log.info("%d of %d graphs captured in %.1f s", len(self._captured), len(buckets), spent)

    def estimate(self) -> None:
        """Captures the two largest graphs, and sets `num_bytes` to the memory of all graphs that may ever be captured.

        The largest graph allocates the memory that all graphs share. Every other graph takes its own inputs and output,
        whose sizes are known, and the driver's memory for a graph, which is measured with the second largest graph.
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
        """Counts the bytes that a graph does not share: its inputs, in words of 4 bytes, and its output."""
        output = next(iter(self._captured.values()))[1].output
        return 4 * bucket.num_words(self._sizes) + bucket.num_seqs * output[:1].nbytes

    def takes(self, step: StepInputs) -> bool:
        """Returns whether a graph for the step exists or may be captured; other steps are computed op by op."""
        bucket = self._buckets.find(step)
        if bucket is None or bucket in self._captured or bucket.max_new_tokens == 1:
            return bucket is not None
        return sum(each.max_new_tokens > 1 for each in self._captured) < MAX_MIXES

    def decode_loop(self) -> None:
        """Steps are launched ahead instead."""

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
        """Computes the chosen hidden rows [S, hidden_size]."""
        return elementwise.embedding(inputs.chosen, self._forward(*inputs.unpack()))


def taken_bytes(device: torch.device) -> tuple[int, int]:
    """Returns the bytes that torch has reserved on a GPU, and all bytes in use there, which include the driver's.

    The caller takes the larger growth of the two, since another process may free or take memory meanwhile.
    """
    if device.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.memory_reserved(device), total - free
