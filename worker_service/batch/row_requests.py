"""The requests of the input batch's rows: columns and lists that never change while a sequence has its row.

Owns them for every row. Knows neither a sequence's tokens nor what a step computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from blockyard.contract.pooling import PoolingKind
from worker_service.pooling.rows import PooledRows, PoolingRequest
from worker_service.sampling.sampling_state import SAMPLING_FIELDS, SequenceLists, write_sampling

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blockyard.model_config.pooling.rule import PoolingRule
    from blockyard_kernels.drafting import Ids
    from worker_service.grammars.matchers import Grammars, GrammarState
    from worker_service.sampling.sampling_state import Follower
    from worker_service.step import Array, NewRow

    Followers = list[tuple[int, Follower]]

# The length at which a row ends that the scheduler alone ends.
NO_LENGTH = 2**62

ROW = np.dtype(
    [
        ("prompt_length", np.int64),
        # The host must know the row's tokens, or the row requests more than a token: no step with the row is
        # launched before the previous step is finished.
        ("must_wait", np.bool_),
        # The length of prompt and output at which the row ends.
        ("max_length", np.int64),
        # The row's adapter; 0: none.
        ("lora_id", np.int64),
        # The number of first tokens of the prompt that are a soft prompt. They get no log probabilities; neither does
        # the token behind them, like the first token of any prompt.
        ("num_virtual_tokens", np.int64),
        *SAMPLING_FIELDS,
    ],
    align=True,
)


@dataclass(frozen=True, slots=True, eq=False)
class RowRequests:
    """Rows [R] that a step samples: their sequences, the last hidden row of each, and their sampling parameters.

    `columns` are records ROW. `followers` are the states that take a row's tokens, `has_bad_words`
    the rows that have bad words, both by place among the R.
    """

    sequence_ids: tuple[int, ...]
    rows: Array
    last_hidden: Array
    columns: npt.NDArray[np.void]
    lists: list[SequenceLists]
    followers: Followers
    has_bad_words: list[int]
    # The grammar states of rows that have a grammar, by place among the R.
    grammars: list[tuple[int, GrammarState]]
    stop_token_ids: Array
    # A stop token ends a row only if the output has at least this many tokens before it.
    least_tokens: Array
    # The place of each row's last token: the row ends there with any token.
    last_places: Array
    # Whether every row takes the likeliest token of its unchanged logits, without log probabilities.
    is_plain_greedy: bool

    def __len__(self) -> int:
        return len(self.rows)

    def ids(self, chosen: npt.NDArray[np.bool_]) -> tuple[int, ...]:
        return tuple(compress(self.sequence_ids, chosen.tolist()))

    def repeated(self, owners: Array, last_hidden: Array) -> RowRequests:
        """Returns rows in which those of this appear as often as `owners` has their places, without ids and states."""
        of_each = owners.tolist()
        return RowRequests(
            (),
            self.rows[owners],
            last_hidden,
            self.columns[owners],
            [self.lists[owner] for owner in of_each],
            followers=[],
            has_bad_words=[],
            grammars=[],
            stop_token_ids=self.stop_token_ids[owners],
            least_tokens=self.least_tokens[owners],
            last_places=self.last_places[owners],
            is_plain_greedy=self.is_plain_greedy,
        )

    def are_stops(self, token_ids: Array, num_tokens: Array) -> npt.NDArray[np.bool_]:
        """Returns whether each row [R] ends with its next token; the row had `num_tokens` tokens before it."""
        are_last = num_tokens >= self.last_places
        are_stop_tokens = self.stop_token_ids == token_ids[:, None]
        # Few steps sample a stop token, and counting costs a third of `any`.
        if np.count_nonzero(are_stop_tokens):
            are_last |= are_stop_tokens.any(-1) & (num_tokens >= self.least_tokens)
        return are_last


class RequestTable:
    def __init__(self, vocab_size: int, rule: PoolingRule | None = None, grammars: Grammars | None = None) -> None:
        """`rule`: the pooling rule of a model that pools. `grammars`: the grammars of a model that samples."""
        self.columns = np.zeros(0, ROW)
        self.poolings: dict[int, PoolingRequest] = {}
        """The pooling requests by row."""
        self._vocab_size = vocab_size
        self._grammars = grammars
        self.rule = rule
        self._lists: dict[int, SequenceLists] = {}
        self._stop_token_ids = np.zeros((0, 1), np.int64)

    def grow(self, num_rows: int) -> None:
        self.columns = with_rows(self.columns, num_rows)
        self._stop_token_ids = with_rows(self._stop_token_ids, num_rows)

    def add(self, row: int, sequence: NewRow) -> None:
        lists = self._lists[row] = SequenceLists(sequence, self._vocab_size, self._grammars)
        record: Any = self.columns[row]
        write_sampling(record, sequence, lists, self._vocab_size)
        record["prompt_length"] = sequence.prompt_length
        record["max_length"] = sequence.max_length or NO_LENGTH
        record["lora_id"] = sequence.lora_id
        record["num_virtual_tokens"] = sequence.num_virtual_tokens
        asks = max(record["logprobs"], record["prompt_logprobs"]) >= 0 or record["num_beam_candidates"] > 0
        follows = bool(lists.followers or lists.bad_words or sequence.sampling.grammar)
        record["must_wait"] = asks or follows
        if sequence.pooling is not None and self.rule is not None:
            makes_vectors = sequence.pooling.kind not in (PoolingKind.CLASSIFY, PoolingKind.LABEL_LOGITS, None)
            kind = sequence.pooling.kind if makes_vectors else self.rule.rows
            self.poolings[row] = PoolingRequest(sequence.pooling, PooledRows(kind or self.rule.rows))
        self._write_stop_token_ids(row, lists.stop_token_ids)

    def _write_stop_token_ids(self, row: int, token_ids: Array) -> None:
        missing = len(token_ids) - self._stop_token_ids.shape[1]
        if missing > 0:
            self._stop_token_ids = np.pad(self._stop_token_ids, ((0, 0), (0, missing)), constant_values=-1)
        self._stop_token_ids[row] = -1
        self._stop_token_ids[row, : len(token_ids)] = token_ids

    def fork(self, parent: int, child: int, sequence_index: int) -> None:
        """Copies a row's request, and its token counts, which change separately afterwards."""
        self.columns[child] = self.columns[parent]
        self.columns["sequence_index"][child] = sequence_index
        self._stop_token_ids[child] = self._stop_token_ids[parent]
        self._lists[child] = self._lists[parent].copy()

    def forget(self, row: int) -> None:
        del self._lists[row]
        self.poolings.pop(row, None)

    def lists_of(self, rows: Array) -> list[SequenceLists]:
        return [self._lists[row] for row in rows.tolist()]

    def stop_token_ids(self, rows: Array) -> Array:
        """Copies the stop tokens of rows: [n, any], filled up with -1."""
        return self._stop_token_ids[rows]

    def followers_of(self, rows: Array) -> Followers:
        """Returns the states to which the rows' tokens are appended, by place."""
        lists = enumerate(map(self._lists.__getitem__, rows.tolist()))
        return [(place, follower) for place, each in lists for follower in each.followers]

    def may_draft(self, rows: Array) -> list[bool]:
        """Returns whether each row's request lets tokens be drafted."""
        return [self._lists[row].may_draft for row in rows.tolist()]

    def predicted(self, rows: Array) -> list[Ids | None]:
        """Returns the ids that each row's request predicts; None: it predicts none."""
        return [self._lists[row].predicted_token_ids for row in rows.tolist()]

    def grammars(self, rows: Array) -> list[tuple[int, GrammarState]]:
        """Returns the grammar states of the rows that have one, by place."""
        return find_grammars(map(self._lists.__getitem__, rows.tolist()))

    def gather(self, sequence_ids: tuple[int, ...], rows: Array, last_hidden: Array) -> RowRequests:
        """Gathers the requests of some rows. They are valid while each row belongs to the same sequence."""
        columns = self.columns.take(rows)
        lists = [self._lists[row] for row in rows.tolist()]
        editing = np.flatnonzero(columns["edits_logits"]).tolist()
        is_plain = (columns["temperature"] == 0) & ~columns["edits_logits"] & (columns["logprobs"] < 0)
        return RowRequests(
            sequence_ids=sequence_ids,
            rows=rows,
            last_hidden=last_hidden,
            columns=columns,
            lists=lists,
            followers=[(place, follower) for place in editing for follower in lists[place].followers],
            grammars=[(place, state) for place in editing if (state := lists[place].grammar) is not None],
            has_bad_words=[place for place in editing if lists[place].bad_words],
            stop_token_ids=self._stop_token_ids[rows],
            least_tokens=columns["prompt_length"] + columns["min_tokens"],
            last_places=columns["max_length"] - 1,
            is_plain_greedy=np.count_nonzero(is_plain) == len(rows),
        )


def find_grammars(lists: Iterable[SequenceLists]) -> list[tuple[int, GrammarState]]:
    """Returns the grammar states of the sequences that have one, each with its sequence's place."""
    return [(place, each.grammar) for place, each in enumerate(lists) if each.grammar is not None]


def with_rows(array: npt.NDArray[Any], num_rows: int) -> npt.NDArray[Any]:
    """Returns a copy of an array with more rows; the new rows are zero."""
    grown = np.zeros((num_rows, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown
