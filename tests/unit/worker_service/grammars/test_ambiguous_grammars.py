"""Rules that may be read in more and more ways end by a count, before one row of them takes a worker seconds."""

from __future__ import annotations

import time

import numpy as np
import pytest
from llguidance import LLTokenizer

from blockyard.contract.request import Lark
from blockyard.errors import Reason
from gateway.grammars.checking import check_format
from worker_service.grammars.matchers import Grammars

BYTES = LLTokenizer("byte")
MAX_TOKENS = 400
AMBIGUOUS = {
    "of one letter": "start: e\ne: e e | /[a-z]/",
    "of the first rule": "start: start start | /[a-z]/",
    "in turn": "start: a\na: b a | a b | /[a-z]/\nb: a a | b b | /[a-z]/",
    "of repetitions": "start: ((/[a-z]/ | /[a-z]{2}/)*)*",
    "of a grammar in another": "start: %lark {\nstart: e\ne: e e | /[a-z]/\n}",
}
PLAIN = {
    "of one repetition": "start: (A | A A | A A A)*\nA: /[a-z]/",
    "of terminals": "start: /[a-z]{3}/ (A | B)*\nA: /[a-z]+/\nB: A /[0-9]/",
    "of JSON": 'start: (%json {"type": "array", "items": {"type": "integer"}} "\\n")+',
}


def follow(text: str) -> tuple[int, Reason | None]:
    """How many letters it takes, up to MAX_TOKENS, and why no more."""
    grammars = Grammars(BYTES, BYTES.vocab_size)
    state = grammars.follow(check_format(Lark(text), lambda _: ""), np.array([], np.int64), np.array([], np.int64))
    for place in range(MAX_TOKENS):
        grammars.begin_masks([(0, state)]).join()
        if state.failure is not None:
            return place, state.failure.reason
        state.add(ord("abc"[place % 3]))
    return MAX_TOKENS, None


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_may_be_ambiguous_ends_by_a_count(name: str) -> None:
    before = time.process_time()
    num_tokens, reason = follow(AMBIGUOUS[name])
    assert reason is Reason.GRAMMAR_TOO_COMPLEX
    assert num_tokens > 2
    assert time.process_time() - before < 2


@pytest.mark.parametrize("name", ["of one repetition", "of terminals"])
def test_what_is_read_in_few_ways_goes_on(name: str) -> None:
    assert follow(PLAIN[name]) == (MAX_TOKENS, None)


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_read_in_few_ways_is_left_as_it_is(name: str) -> None:
    assert check_format(Lark(PLAIN[name]), lambda _: "") == PLAIN[name]
