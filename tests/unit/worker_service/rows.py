"""Rows for the sampler, without a batch, and a look at those of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from blockyard.contract.sampling import SamplingParams
from blockyard_kernels.select import get_backend
from worker_service.batch.row_requests import ROW
from worker_service.sampling.sampler import Sampler, SampleRows
from worker_service.sampling.sampling_state import SequenceLists, write_sampling
from worker_service.step import NewRow, no_ids

if TYPE_CHECKING:
    from worker_service.batch.input_batch import InputBatch
    from worker_service.step import Array

VOCAB = 2000


def sequence(
    token_ids: list[int] | None = None, prompt_length: int = 1, *, index: int = 0, min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (), num_beam_candidates: int = 0, **fields: Any
) -> NewRow:  # fmt: skip
    ids = np.array(token_ids or [3], np.int64)
    return NewRow(
        1,
        index,
        ids,
        prompt_length,
        0,
        no_ids(),
        SamplingParams(**fields),
        min_tokens,
        stop_token_ids,
        num_beam_candidates,
    )


def rows_of(*sequences: NewRow) -> SampleRows:
    columns = np.zeros(len(sequences), ROW)
    lists = [SequenceLists(one, VOCAB) for one in sequences]
    for row, one in enumerate(sequences):
        write_sampling(columns[row], one, lists[row], VOCAB)
    positions = np.array([len(one.token_ids) - one.prompt_length for one in sequences], np.int64)
    outputs = {row: one.token_ids[one.prompt_length :] for row, one in enumerate(sequences) if lists[row].bad_words}
    return SampleRows(columns, positions, lists, outputs)


def make_sampler(cpu_kernels: str = "reference") -> Sampler:
    return Sampler(get_backend(torch.device("cpu"), torch.float32, cpu_kernels))


def block_table_of(batch: InputBatch, sequence_id: int) -> Array:
    """Gives a copy of a sequence's block table."""
    row = batch._row_of[sequence_id]
    return batch._block_tables[row, : batch._progress["num_blocks"][row]].astype(np.int64)
