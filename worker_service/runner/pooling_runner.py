"""Runs the network on forward batches and makes vectors, scores or labels of its rows instead of tokens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from blockyard.contract.pooling import PoolingKind
from worker_service.pooling.head import PoolingHead, finish
from worker_service.pooling.rows import PoolingRequest, normalise
from worker_service.runner.model_runner import ModelRunner, RunnerOutput
from worker_service.step import Pooled

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from worker_service.batch.forward_batch import ForwardBatch
    from worker_service.batch.input_batch import InputBatch
    from worker_service.lora.slots import AdapterSlots
    from worker_service.models.loader import RunnableModel

    Floats = npt.NDArray[np.float32]


class PoolingRunner(ModelRunner):
    """One model that pools, on one device. Used by the device thread alone."""

    def __init__(self, loaded: RunnableModel, slots: AdapterSlots | None = None) -> None:
        super().__init__(loaded, slots)
        # Steps make no logits of the vocabulary.
        self.has_head = False

    @property
    def depth(self) -> int:
        """1: rows are copied to the host before the next step."""
        return 1

    @torch.inference_mode()
    def run(self, forward_batch: ForwardBatch, batch: InputBatch, kv_pool: Tensor) -> RunnerOutput:
        """Computes a step's rows, and pools the sequences whose last row is among them."""
        started = time.perf_counter()
        layout = forward_batch.layout
        self.slots.bring(self.slots.take_due())
        if not len(layout.rows):
            return RunnerOutput()
        lora, forward_batch = self._lora_rows(layout), self._place(forward_batch)
        token_ids = self._to_device(forward_batch.token_ids)
        types = self._token_types(forward_batch)
        plan = self._plan(forward_batch, batch.limits.block_size, lora)
        hidden = self.model.forward(token_ids, plan, kv_pool, types)
        self._synchronize()
        computed = time.perf_counter()
        due: list[tuple[int, PoolingRequest]] = []
        for piece in forward_batch.pooled:
            piece.request.rows.add(hidden[piece.first_hidden : piece.first_hidden + piece.num_rows])
            if piece.is_due:
                due.append((piece.sequence_id, piece.request))
        pooled = self._pool([request for _, request in due]) if due else []
        output = Pooled(tuple(sequence_id for sequence_id, _ in due), tuple(pooled))
        return RunnerOutput(
            pooled=output, forward_seconds=computed - started, sample_seconds=time.perf_counter() - computed
        )

    def _token_types(self, forward_batch: ForwardBatch) -> Tensor | None:
        """Makes the type of each row of whole prompts; None: all are 0."""
        starts = [piece.request.pooling.second_from for piece in forward_batch.pooled]
        if not any(starts):
            return None
        types = np.zeros(len(forward_batch.token_ids), np.int64)
        for start, piece in zip(starts, forward_batch.pooled, strict=True):
            if start:
                types[piece.first_hidden + start : piece.first_hidden + piece.num_rows] = 1
        return self._to_device(types)

    def _pool(self, requests: Sequence[PoolingRequest]) -> list[Floats]:
        """Computes the pooled numbers of each sequence whose rows are complete."""
        head, backend = self.model.pooling, self.backend
        assert head is not None
        if head.rule.kind is PoolingKind.LABEL_LOGITS:
            return [self._weigh_labels(head, each) for each in requests]
        parts = [self._pooled(each) for each in requests]
        products = head.multiply(backend, torch.cat(parts)).numpy(force=True)
        ends = np.cumsum([len(part) for part in parts])[:-1]
        return [self._finish(rows, each) for rows, each in zip(np.split(products, ends), requests, strict=True)]

    def _weigh_labels(self, head: PoolingHead, request: PoolingRequest) -> Floats:
        logits = head.label_logits(self.backend, self._pooled(request), request.pooling.label_token_ids)
        return finish(head.rule, logits.numpy(force=True)[0])

    def _pooled(self, request: PoolingRequest) -> Tensor:
        """Returns a sequence's pooled rows, in the dtype of the head's products, if there are any."""
        rows = request.rows.finish()
        head = self.model.pooling
        assert head is not None
        has_products = bool(head.products) or head.table is not None
        return rows.to(self.backend.device, self.config.dtype if has_products else torch.float32)

    def _finish(self, rows: Floats, request: PoolingRequest) -> Floats:
        head, pooling = self.model.pooling, request.pooling
        assert head is not None
        if pooling.kind is PoolingKind.CLASSIFY:
            return rows[0].copy() if pooling.leaves_raw else finish(head.rule, rows[0])
        if pooling.dimensions:
            rows = rows[:, : pooling.dimensions]
        return (normalise(rows) if pooling.normalise else rows).flatten()


def make_runner(loaded: RunnableModel, slots: AdapterSlots | None = None) -> ModelRunner:
    """Makes the runner for a model's task. `slots`: the LoRA slots."""
    return (ModelRunner if loaded.config.pooling is None else PoolingRunner)(loaded, slots)
