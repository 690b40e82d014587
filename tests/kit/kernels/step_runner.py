"""Runs a model step by step with a block table for each sequence: the smallest engine there is, for tests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from blockyard.contract.parallel import ALONE, Parallel
from blockyard.contract.workers import LoraLimits
from blockyard_kernels.capture import CaptureSizes, StepInputs
from blockyard_kernels.select import get_backend
from worker_service.cache_engine import BlockFormat
from worker_service.lora.adapter import LoraRequest
from worker_service.lora.reader import AdapterReader
from worker_service.lora.slots import AdapterSlots
from worker_service.models.builder import build_decoder
from worker_service.models.model_config import hold_kv_in, read_config
from worker_service.models.weight_files import WeightFiles
from worker_service.step import Step

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence
    from pathlib import Path

    from torch import Tensor

    from blockyard_kernels.capture import CapturedStep
    from blockyard_kernels.ops import Backend
    from worker_service.models.decoder import DecoderModel

CPU = torch.device("cpu")


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """A pool whose numbers are NaN; of int8 its scales are, since all bits are set."""
    return torch.full(shape, -1 if dtype == torch.int8 else float("nan"), dtype=dtype, device=device)


@dataclass(slots=True)
class _Row:
    length: int = 0
    block_ids: list[int] = field(default_factory=list[int])
    """Those of each KV group side by side."""
    shared: int = 0
    """Leading places whose blocks belong to another sequence."""


class StepRunner:
    """A model, its pool, and the sequences in it. The pool starts poisoned, and blocks are handed out in random order.

    What has fallen behind a window is given back after each step, and a block of NaN stands in its place.
    """

    def __init__(
        self, model: DecoderModel, backend: Backend, *, block_size: int = 32, num_blocks: int = 400, seed: int = 0
    ) -> None:
        config = model.config
        num_blocks *= model.kv_groups.num_groups
        shape = BlockFormat.of(model, block_size).pool_shape(num_blocks)
        self.model = model
        self.pool = poisoned(shape, config.kv_dtype, backend.device)
        self._poison_value = self.pool.flatten()[0].item()
        self._backend = backend
        self._block_size = block_size
        self._rows: dict[Hashable, _Row] = {}
        self._groups = model.kv_groups
        self._num_groups = model.kv_groups.num_groups
        self._free = list(range(num_blocks - 1))
        self._poison = num_blocks - 1
        self._captured: CapturedStep | None = None
        self.finite: list[bool] | None = None
        """Which rows of the last step a replay found finite; None where it was computed op by op."""
        self.is_exact = False
        """Whether the backend promised, when it was asked, that a row is the same bits in every batch."""
        self.num_replayed = 0
        """Steps that were replayed, and not computed op by op."""
        self.slots = AdapterSlots()
        self._lora_ids: dict[Hashable, int] = {}
        random.Random(seed).shuffle(self._free)

    @classmethod
    def load(
        cls,
        folder: Path,
        dtype: torch.dtype,
        backend: Backend | None = None,
        *,
        block_size: int = 32,
        seed: int = 0,
        parallel: Parallel = ALONE,
        kv_cache_dtype: str = "auto",
    ) -> StepRunner:
        """Loads a model folder, or a rank's share of it, on the reference backend unless another one is given."""
        backend = backend or get_backend(CPU, torch.float32, "reference")
        files = WeightFiles(folder, lambda done_bytes, total_bytes: None)
        model = build_decoder(hold_kv_in(kv_cache_dtype, read_config(folder, dtype)), backend, files, parallel)
        return cls(model, backend, block_size=block_size, seed=seed)

    def capture(self, max_num_tokens: int, max_num_seqs: int = 64, max_length: int = 2048) -> StepRunner:
        """Records the network: from now on steps within these sizes are replayed. Gives itself."""
        self.model.reserve_positions(max_length)
        sizes = CaptureSizes(max_num_tokens, max_num_seqs, self._block_size, self.model.config.sliding_window)
        self._captured = self.model.capture(self.pool, sizes)
        assert self._captured is not None, "this backend records nothing"
        return self

    def probe(self) -> StepRunner:
        """Asks what is promised on this processor; on the way products may be packed anew. Gives itself."""
        self.is_exact = self.model.probe()
        return self

    def differing_rows(self, got: Tensor, expected: Tensor) -> int:
        """Counts the rows of logits that are not as promised: the same bits; or near, where no bits are promised."""
        if self.is_exact:
            return int((got != expected).any(dim=1).sum())
        tolerance = 1e-3 if self.model.config.dtype is torch.float32 else 0.3
        return int((~torch.isclose(got, expected, rtol=tolerance, atol=tolerance)).any(dim=1).sum())

    def length(self, key: Hashable) -> int:
        """Tokens of a sequence so far; 0 for one that is not there."""
        return self._rows[key].length if key in self._rows else 0

    def step(self, work: Sequence[tuple[Hashable, Sequence[int]]]) -> list[Tensor]:
        """Computes new tokens of sequences, in this order -> for each the logits [new tokens, vocab_size]."""
        for key, token_ids in work:
            self._extend(self._rows.setdefault(key, _Row()), len(token_ids))
        rows = [self._rows[key] for key, _ in work]
        counts = [len(token_ids) for _, token_ids in work]
        inputs = self._inputs(rows, work)
        lora_ids = np.array([self._lora_ids.get(key, 0) for key, _ in work], np.int64)
        placed = self.slots.place(inputs.token_ids, lora_ids, inputs.num_new_tokens)
        inputs = replace(inputs, token_ids=placed, lora=self.slots.find_rows(lora_ids, inputs.num_new_tokens))
        if self._captured is not None and self._captured.takes(inputs):
            self.num_replayed += 1
            outputs = self._captured.replay(inputs, with_logits=True)
            logits, self.finite = outputs.logits, None if outputs.finite is None else outputs.finite.tolist()
            assert logits is not None
            logits = logits.clone()
        else:
            logits, self.finite = self._compute(inputs), None
        for row in rows:
            self._give_back(row)
        return list(logits.split(counts))

    def _give_back(self, row: _Row) -> None:
        """Poisons and frees what no later query of a sequence sees, unless others have it too."""
        num_groups, shared = (
            self._num_groups,
            {block for other in self._rows.values() if other is not row for block in other.block_ids},
        )
        for group, window in enumerate(self._groups.windows):
            num_behind = max(0, row.length - window + 1) // self._block_size if window else 0
            for place in range(group, num_behind * num_groups, num_groups):
                block = row.block_ids[place]
                if block != self._poison and block not in shared and place >= row.shared:
                    self.pool[block] = self._poison_value
                    self._free.insert(0, block)
                row.block_ids[place] = self._poison

    def _compute(self, inputs: StepInputs) -> Tensor:
        """Op by op, the last layer for all rows."""
        window = self.model.config.sliding_window
        batch = self._backend.plan_attention(
            inputs.num_new_tokens, inputs.seq_lens, inputs.block_tables, self._block_size, window, self._num_groups
        )
        token_ids = torch.from_numpy(inputs.token_ids).to(self._backend.device)
        hidden = self.model.forward(token_ids, replace(batch, lora=inputs.lora), self.pool)
        return self.model.compute_logits(hidden)

    def make_slots(self, folders: Sequence[Path], max_rank: int = 8, max_virtual_tokens: int = 0) -> StepRunner:
        """Brings adapters into slots, as lora_id 1, 2... Gives itself. Before `probe` and `capture`."""
        assert self._backend.lora is not None or not max_rank, "this backend takes no LoRA adapters"
        limits = LoraLimits(len(folders), max_rank, len(folders), max_virtual_tokens)
        reader = AdapterReader(self.model, self._backend.lora, limits)
        adapters = {i: reader.read(LoraRequest(i, folder.name, ""), folder) for i, folder in enumerate(folders, 1)}
        self.slots = AdapterSlots(len(folders), adapters, reader.write, max_virtual_tokens)
        ids = np.arange(len(folders))
        self.slots.activate(Step(1, 1, activated_lora_slots=ids, activated_lora_ids=ids + 1))
        self.slots.bring(self.slots.take_due())
        return self

    def adapt(self, key: Hashable, lora_id: int) -> None:
        """Gives a sequence an adapter, before its first step."""
        self._lora_ids[key] = lora_id

    def share(self, parent: Hashable, child: Hashable, num_blocks: int) -> None:
        """Starts a sequence on the first full blocks of another one."""
        num_places = num_blocks * self._num_groups
        self._rows[child] = _Row(num_blocks * self._block_size, self._rows[parent].block_ids[:num_places], num_places)

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Starts a sequence as a copy of another one: full blocks are shared, the last one is copied."""
        row = self._rows[parent]
        num_full = row.length // self._block_size * self._num_groups
        copy = _Row(row.length, row.block_ids[:num_full], num_full)
        for block in row.block_ids[num_full:]:
            copy.block_ids.append(self._free.pop())
            self._backend.copy_blocks(self.pool, [(block, copy.block_ids[-1])])
        self._rows[child] = copy

    def drop(self, key: Hashable) -> None:
        """Forgets a sequence, poisons its blocks and frees them."""
        row = self._rows.pop(key)
        own = [block for block in row.block_ids[row.shared :] if block != self._poison]
        self.pool[own] = self._poison_value
        self._free[:0] = own

    def drop_all(self) -> None:
        """Forgets all sequences, those that share blocks first."""
        for key in sorted(self._rows, key=lambda key: -self._rows[key].shared):
            self.drop(key)

    def move(self, key: Hashable) -> None:
        """Takes a sequence's blocks out to another pool and back into other blocks, as a swap does."""
        row = self._rows[key]
        host = torch.full_like(self.pool, self._poison_value)
        blocks = [block for block in row.block_ids if block != self._poison]
        host_ids = list(range(len(blocks)))
        self._backend.swap_blocks(self.pool, host, list(zip(blocks, host_ids, strict=True)))
        others = [self._free.pop() for _ in blocks]
        self.pool[blocks] = self._poison_value
        self._free[:0] = blocks
        self._backend.swap_blocks(host, self.pool, list(zip(host_ids, others, strict=True)))
        moved = dict(zip(blocks, others, strict=True))
        row.block_ids = [moved.get(block, block) for block in row.block_ids]

    def run(self, key: Hashable, token_ids: Sequence[int], pieces: Iterable[int]) -> Tensor:
        """Computes a sequence alone in pieces of these lengths -> all its logits."""
        logits: list[Tensor] = []
        start = 0
        for length in pieces:
            logits += self.step([(key, token_ids[start : start + length])])
            start += length
        return torch.cat(logits)

    def _extend(self, row: _Row, num_tokens: int) -> None:
        row.length += num_tokens
        while len(row.block_ids) // self._num_groups * self._block_size < row.length:
            row.block_ids.extend(self._free.pop() for _ in range(self._num_groups))

    def _inputs(self, rows: Sequence[_Row], work: Sequence[tuple[Hashable, Sequence[int]]]) -> StepInputs:
        """A step in which every row's logits are wanted."""
        counts = np.array([len(token_ids) for _, token_ids in work], np.int64)
        widest = max((len(row.block_ids) for row in rows), default=0) // self._num_groups
        tables = np.zeros((self._num_groups, len(rows), widest), np.int32)
        for group, own in enumerate(tables):
            for table, row in zip(own, rows, strict=True):
                places = row.block_ids[group :: self._num_groups]
                table[: len(places)] = places
        return StepInputs(
            num_new_tokens=counts,
            seq_lens=np.array([row.length for row in rows], np.int64),
            block_tables=tables.reshape(self._num_groups * len(rows), widest),
            token_ids=np.array([token_id for _, token_ids in work for token_id in token_ids], np.int64),
            chosen=np.arange(counts.sum()),
        )
