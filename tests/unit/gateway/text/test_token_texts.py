"""Texts of single tokens, for each kind of tokenizer that the detokenizer knows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.contract.events import TokenLogprobs
from blockyard.contract.sampling import Candidates
from gateway.request import ReturnedLogprob
from tests.unit.gateway.harness import END_OF_TURN, demo_tokenizer

KEPT = demo_tokenizer().token_texts(skip_special_tokens=False)
SKIPPED = demo_tokenizer().token_texts(skip_special_tokens=True)


def test_a_token_is_told_with_its_text_and_the_likeliest_in_its_place() -> None:
    tokenizer = demo_tokenizer()
    [hello, world] = [tokenizer.encode(text, False)[0] for text in ("he", " w")]
    told = SKIPPED.logprobs_of(Candidates([hello, world, hello], [-2.0, -0.25, -2.0], [2, 1, 2]))
    chosen = ReturnedLogprob(hello, "he", -2.0, 2, b"he")
    assert told == TokenLogprobs(chosen, (ReturnedLogprob(world, " w", -0.25, 1, b" w"), chosen))


def test_a_token_alone_has_no_others() -> None:
    assert SKIPPED.logprobs_of(Candidates([5], [-1.0], [9])).top == ()


def test_part_of_a_character_is_told_by_its_bytes() -> None:
    tokenizer = demo_tokenizer()
    parts = [SKIPPED.of(token_id) for token_id in tokenizer.encode("日", False)]
    assert len(parts) > 1
    assert "".join(text for text, _ in parts) == "\ufffd" * len(parts)
    assert b"".join(raw for _, raw in parts).decode() == "日"


def test_a_special_token_has_a_text_and_adds_what_is_returned() -> None:
    text, raw = KEPT.of(END_OF_TURN)
    assert text and raw == text.encode()
    assert SKIPPED.of(END_OF_TURN) == (text, b"")


@pytest.mark.parametrize("token_id", [4096, 2**31])
def test_an_id_without_a_piece_has_no_text(token_id: int) -> None:
    assert SKIPPED.of(token_id) == ("", b"")


@given(st.text(max_size=40))
def test_the_bytes_together_are_the_text(text: str) -> None:
    token_ids = demo_tokenizer().encode(text, add_special_tokens=False)
    assert b"".join(KEPT.of(token_id)[1] for token_id in token_ids) == text.encode()
