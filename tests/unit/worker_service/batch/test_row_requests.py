"""What rows ask for: gathered columns, stops, and which rows need no sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blockyard.contract.sampling import SamplingParams
from worker_service.batch.row_requests import RequestTable, RowRequests
from worker_service.step import Array, NewRow, no_ids

VOCAB = 100


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


def request(stop_token_ids: tuple[int, ...] = (), min_tokens: int = 0, **fields: Any) -> NewRow:
    """A sequence with a prompt of three tokens; what it asks for is greedy unless told otherwise."""
    sampling = SamplingParams(**{"temperature": 0.0} | fields)
    return NewRow(1, 0, np.arange(3), 3, 0, no_ids(), sampling, min_tokens, stop_token_ids)


def gather(table: RequestTable, rows: Array) -> RowRequests:
    return table.gather(tuple(rows.tolist()), rows, np.zeros_like(rows))


def requests_of(*sequences: NewRow) -> RowRequests:
    table = RequestTable(VOCAB)
    table.grow(len(sequences) + 1)
    for row, sequence in enumerate(sequences, 1):
        table.add(row, sequence)
    return gather(table, np.arange(1, len(sequences) + 1))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5},
        {"logprobs": 0},
        {"frequency_penalty": 0.1},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": (4,)},
        {"bad_token_sequences": ((4,),)},
        {"stop_token_ids": (4,), "min_tokens": 1},
    ],
)
def test_one_row_that_asks_for_something_is_enough_for_the_sampler(fields: dict[str, Any]) -> None:
    assert not requests_of(request(), request(**fields)).is_plain_greedy


def test_greedy_rows_need_no_sampler() -> None:
    plain = request(stop_token_ids=(4, 5), prompt_logprobs=3, top_k=4, seed=9)
    assert requests_of(plain, request(min_tokens=4)).is_plain_greedy
    assert requests_of().is_plain_greedy


def test_a_row_ends_with_its_own_stop_tokens_only() -> None:
    requests = requests_of(request((4, 5, 6)), request((7,)), request())
    for token_ids, stops in (((6, 6, 6), [True, False, False]), ((7, 7, 7), [False, True, False])):
        assert requests.are_stops(ints(*token_ids), ints(3, 3, 3)).tolist() == stops


def test_a_row_ends_from_its_least_tokens_on() -> None:
    requests = requests_of(request((4,), min_tokens=2), request((4,)))
    ends = [requests.are_stops(ints(4, 4), ints(count, count)).tolist() for count in (3, 4, 5)]
    assert ends == [[False, True], [False, True], [True, True]]


def test_stop_tokens_beyond_the_vocabulary_do_not_count() -> None:
    assert not requests_of(request((VOCAB,))).are_stops(ints(VOCAB), ints(9)).any()


def test_places_are_those_of_the_rows_gathered() -> None:
    requests = requests_of(
        request(), request(frequency_penalty=1.0), request(bad_token_sequences=((1,),)), request(presence_penalty=1.0)
    )
    assert [place for place, _ in requests.followers] == [1, 3]
    assert all(counts is requests.lists[place].counts for place, counts in requests.followers)
    assert requests.has_bad_words == [2]


def test_a_fork_asks_for_what_its_parent_asks_for() -> None:
    table = RequestTable(VOCAB)
    table.grow(2)
    table.add(0, request((4,), min_tokens=1, frequency_penalty=1.0, seed=5))
    table.fork(0, 1, sequence_index=3)
    both = gather(table, ints(0, 1))
    assert both.columns["sequence_index"].tolist() == [0, 3]
    assert both.columns["seed"].tolist() == [5, 5]
    assert both.are_stops(ints(4, 4), ints(9, 9)).all()
    both.followers[0][1].add(8)
    assert [len(counts.token_ids) for _, counts in both.followers] == [4, 3]


def test_a_table_grows_around_its_rows() -> None:
    table = RequestTable(VOCAB)
    table.grow(1)
    table.add(0, request((4,), seed=7))
    table.grow(3)
    table.add(2, request((5, 6, 7)))
    table.forget(2)
    table.add(2, request((8,)))
    both = gather(table, ints(0, 2))
    assert both.columns["seed"].tolist() == [7, 0]
    assert both.are_stops(ints(4, 6), ints(3, 3)).tolist() == [True, False]
