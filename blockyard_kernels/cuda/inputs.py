"""The inputs of a captured step: the host fills an array of words and sends it in one copy; a kernel unpacks it.

A captured step has a fixed number of sequences and tokens, its bucket. A smaller step is padded with sequences of
length 0, so that the padding tokens lie before position 0 and see no keys. They write their keys and values to the last
slot of block 0, which no sequence uses; after a block's last slot there are no slots to clear.
"""
# Triton functions are not plain Python: pyright understands only their syntax.
# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from blockyard_kernels.capture import CaptureSizes, StepInputs
from blockyard_kernels.cuda.lora.segments import ALIGNMENT, Segments, most_tiles, sort_rows
from blockyard_kernels.cuda.plan import StepLengths
from blockyard_kernels.cuda.tokens.last_tokens import take_last_tokens
from blockyard_kernels.lora import LoraRows
from blockyard_kernels.ops import AttentionBatch

if TYPE_CHECKING:
    from torch import Tensor


BLOCK = 256


@dataclass(frozen=True, slots=True)
class Bucket:
    """A size to which steps are padded."""

    num_seqs: int
    """The number of sequences, and the most chosen rows."""
    num_tokens: int
    max_new_tokens: int
    """The most new tokens of a sequence, also of a padding sequence: 1 for decodes."""
    has_loras: bool = False
    """Whether rows may have LoRA adapters; if false, no kernels for adapters are launched."""

    def num_words(self, sizes: CaptureSizes) -> int:
        """Counts the words of the inputs, without the words that align columns."""
        widest = -(-sizes.max_length // sizes.block_size)
        by_slot = self.num_tokens + sizes.num_lora_slots if self.has_loras else 0
        return self.num_tokens + self.num_seqs * (3 + widest) + by_slot


class PaddedInputs:
    """The inputs of the steps of one bucket, on the device. At first they hold a step of padding only."""

    def __init__(self, bucket: Bucket, sizes: CaptureSizes, device: torch.device) -> None:
        self._bucket = bucket
        self._sizes = sizes
        self._widest = -(-sizes.max_length // sizes.block_size)
        columns = [1, bucket.num_seqs, bucket.num_seqs, bucket.num_seqs, bucket.num_tokens]
        if bucket.has_loras:
            columns += [sizes.num_lora_slots + 1, bucket.num_tokens]
        starts = np.cumsum([0, *(-(-count // ALIGNMENT) * ALIGNMENT for count in columns)]).tolist()
        self._columns = [slice(start, start + count) for start, count in zip(starts, columns, strict=False)]
        self._first_table = starts[-1]
        num_words = self._first_table + bucket.num_seqs * self._widest
        self._words = torch.zeros(num_words, dtype=torch.int32, device=device)
        nothing = np.zeros(0, np.int64)
        # With last tokens, so that the kernel of `take_last_tokens` is compiled.
        no_token = torch.zeros(1, dtype=torch.int64, device=device)
        self.fill(StepInputs(nothing, nothing, np.zeros((0, 1), np.int32), nothing, nothing, no_token))

    def fill(self, step: StepInputs) -> None:
        """Sends a step that fits into the bucket to the device, without waiting for the device."""
        count, width = step.block_tables.shape
        num_words = self._first_table + count * width
        # torch reuses pinned memory only when the copy that reads it is done.
        host = torch.empty(num_words, dtype=torch.int32, pin_memory=self._words.device.type == "cuda")
        words = host.numpy()
        words[: self._first_table] = 0
        at_width, new, lens, chosen, ids, *by_slot = (words[column] for column in self._columns)
        at_width[0] = width
        new[:count], lens[:count], chosen[: len(step.chosen)] = step.num_new_tokens, step.seq_lens, step.chosen
        num_tokens = len(step.token_ids)
        ids[:num_tokens] = step.token_ids
        if num_tokens < len(ids):
            # In a bucket of decodes each padding sequence gets one token.
            share, rest = divmod(len(ids) - num_tokens, len(new) - count)
            new[count:] = share
            new[count] += rest
        if by_slot:
            slots = np.full(len(ids), -1, np.int32)
            if step.lora is not None:
                slots[:num_tokens] = step.lora.slots
            by_slot[0][:], by_slot[1][:] = sort_rows(slots, self._sizes.num_lora_slots)
        words[self._first_table :] = step.block_tables.ravel()
        self._words[:num_words].copy_(host, non_blocking=True)
        if step.last_tokens is not None:
            # Not within the graph: `last_tokens` gets a new address when it grows.
            token_ids = self._words[self._columns[4]]
            take_last_tokens(token_ids, step.last_tokens, token_ids)

    @property
    def chosen(self) -> Tensor:
        """The chosen rows, int32 [S], padded with row 0."""
        return self._words[self._columns[3]]

    def unpack(self) -> tuple[Tensor, AttentionBatch]:
        """Launches the unpacking into token ids int64 [T] and a batch. The batch's host arrays hold no real values."""
        bucket, sizes = self._bucket, self._sizes
        width, new, lens, _, token_ids, *_ = (self._words[column] for column in self._columns)
        ids, positions, slots = (torch.empty(bucket.num_tokens, dtype=torch.int64, device=new.device) for _ in range(3))
        tables = new.new_empty(bucket.num_seqs, self._widest)
        _unpack[(bucket.num_seqs,)](
            width, new, lens, token_ids, self._words[self._first_table :], ids, positions, slots, tables,
            self._widest, sizes.block_size, BLOCK,
        )  # fmt: skip
        unknown = np.zeros(bucket.num_seqs, np.int64)
        lengths = StepLengths(new, lens, tables, bucket.num_tokens, bucket.max_new_tokens)
        batch = AttentionBatch(
            unknown, unknown, unknown[:, None], positions, slots, slots[:0], sizes.block_size, sizes.sliding_window,
            work_lists={StepLengths: lengths}, lora=self._lora_rows(),
        )  # fmt: skip
        return ids, batch

    def _lora_rows(self) -> LoraRows | None:
        """Returns the adapters of the rows, without real slots on the host; None if the bucket has no adapters."""
        if not self._bucket.has_loras:
            return None
        bounds, order = (self._words[column] for column in self._columns[5:])
        num_tokens = self._bucket.num_tokens
        by_slot = Segments(order, bounds, most_tiles(num_tokens, self._sizes.num_lora_slots))
        return LoraRows(np.full(num_tokens, -1, np.int32), {Segments: by_slot})


@triton.jit
def _unpack(
    width, num_new_tokens, seq_lens, token_ids, packed_tables, ids, positions, slots, tables, widest, block_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the block table of one sequence [S programs], and the ids, positions and slots of its new tokens."""
    sequence = tl.program_id(0)
    new, length = tl.load(num_new_tokens + sequence), tl.load(seq_lens + sequence)
    packed = packed_tables + sequence.to(tl.int64) * tl.load(width)
    table = tables + sequence.to(tl.int64) * widest
    num_blocks = tl.cdiv(length, block_size)
    for start in range(0, num_blocks, BLOCK):
        places = start + tl.arange(0, BLOCK)
        tl.store(table + places, tl.load(packed + places, places < num_blocks, 0), places < num_blocks)
    first_row = 0
    for start in range(0, sequence, BLOCK):
        others = start + tl.arange(0, BLOCK)
        first_row += tl.sum(tl.load(num_new_tokens + others, others < sequence, 0))
    for start in range(0, new, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        rows, position = first_row + offsets, length - new + offsets
        exists = (offsets < new) & (position >= 0)
        block = tl.load(packed + position // block_size, exists, 0).to(tl.int64)
        offset = tl.where(exists, position % block_size, block_size - 1)
        token_id = tl.load(token_ids + rows, exists, 0)
        tl.store(ids + rows, token_id.to(tl.int64), offsets < new)
        tl.store(positions + rows, tl.maximum(position, 0).to(tl.int64), offsets < new)
        tl.store(slots + rows, block * block_size + offset, offsets < new)
