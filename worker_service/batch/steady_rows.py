"""Gathers the rows of decode steps that need no Python: see `blockyard_kernels.decoding`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from blockyard_kernels.decoding import DecodeRows
from worker_service.batch.row_requests import NO_LENGTH
from worker_service.drafting import drafter

if TYPE_CHECKING:
    import numpy.typing as npt

    from blockyard_kernels.drafting import Ids
    from worker_service.batch.drafts import BatchDrafts
    from worker_service.batch.row_requests import RequestTable
    from worker_service.batch.rows import BatchLimits
    from worker_service.step import Array

    Arrays = tuple[npt.NDArray[np.void], Ids, npt.NDArray[np.int32]]


# The fields that DecodeRows takes from BatchLimits; both have the same names.
_LIMITS = (
    *("vocab_size", "block_size", "num_kv_groups", "max_model_len", "max_num_blocks", "max_num_batched_tokens"),
    *("max_draft_tokens", "max_draft_rows"),
)


def make_steady_rows(
    rows: Array,
    arrays: Arrays,
    requests: RequestTable,
    drafts: BatchDrafts | None,
    limits: BatchLimits,
    num_device_blocks: int,
) -> DecodeRows | None:
    """Gathers the rows of sequences; None: a step with some of them needs Python.

    Args:
        rows: [n], -1 for an unknown sequence.
        arrays: the progress, the tokens and the block tables of all rows.
        requests: the requests of all rows.
        drafts: what is known of all rows' drafts; None: this worker drafts nothing.
        limits: the sizes of rows.
        num_device_blocks: how many there are.
    """
    if requests.rule is not None or limits.num_state_blocks or (rows < 0).any():
        return None
    columns, lists = requests.columns[rows], requests.lists_of(rows)
    asks = (columns["logprobs"] >= 0) | (columns["num_beam_candidates"] > 0) | (columns["lora_id"] != 0)
    if asks.any() or any(each.edit_logits for each in lists):
        return None
    progress, token_ids, block_tables = arrays
    texts = [each.predicted_token_ids for each in lists]
    stop_token_ids = requests.stop_token_ids(rows)
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "sequence_index")
    temperatures, top_k, top_p, min_p, seeds, indexes = (np.ascontiguousarray(columns[name]) for name in names)
    return DecodeRows(
        **{name: getattr(limits, name) for name in _LIMITS},
        num_device_blocks=num_device_blocks,
        progress=progress,
        token_ids=token_ids,
        token_stride=token_ids.shape[1],
        block_tables=block_tables,
        table_stride=block_tables.shape[1],
        num_sequences=len(rows),
        rows=rows,
        prompt_lengths=np.ascontiguousarray(columns["prompt_length"]),
        max_lengths=np.ascontiguousarray(columns["max_length"]),
        least_tokens=columns["prompt_length"] + columns["min_tokens"],
        stop_token_ids=stop_token_ids,
        stop_width=stop_token_ids.shape[1],
        waits=np.ascontiguousarray(columns["edits_logits"]),
        may_draft=columns["max_length"] < NO_LENGTH,
        temperatures=temperatures,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        sequence_indexes=indexes,
        refuses_drafts=np.array([not each.may_draft for each in lists], np.bool_),
        predicted=np.array([0 if text is None else text.ctypes.data for text in texts], np.int64),
        num_predicted=np.array([0 if text is None else len(text) for text in texts], np.int64),
        **_find_drafting(drafts),
    )


def _find_drafting(drafts: BatchDrafts | None) -> dict[str, Any]:
    """Returns the fields about drafts: what is known of all rows' drafts, and the drafter's constants."""
    num_kinds, num_places = drafter.PRIOR.shape
    return {
        "starts_over": None if drafts is None else drafts.starts_over,
        "tried": None if drafts is None else drafts.drafter.tried,
        "right": None if drafts is None else drafts.drafter.right,
        "prior": drafter.PRIOR,
        "kind_bounds": drafter.KIND_BOUNDS,
        "num_kinds": num_kinds,
        "num_places": num_places,
        "prior_weight": drafter.PRIOR_WEIGHT,
        "decay": drafter.DECAY,
        "price_unit": drafter.PER_TOKEN,
    }
