"""The gateway knows which tokens llguidance takes for special: only by their ids can a grammar allow them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from gateway.dialects.dialect import AnswerContext
from gateway.grammars.calls import write_answer
from gateway.text.tokenizer_files import load_tokenizer
from tests.kit.demo_tokens import END_ID, THINK_ID, write_thinking_model

if TYPE_CHECKING:
    from pathlib import Path

llguidance = pytest.importorskip("llguidance")
TEXTS = (
    "<think>",
    "</think>",
    "[THINK]",
    "qqzzx",
    "< qq>",
    "<>",
    "<qq",
    "qq>",
    "<|qq|>",
    "<｜qq｜>",
    "<qq zz>",
    " <qqz>",
)


def allowed(tokenizer: llguidance.LLTokenizer, grammar: str, token_ids: list[int] | None = None) -> set[int]:
    """The ids that may come behind some tokens."""
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    for token_id in token_ids or []:
        assert matcher.consume_token(token_id), token_id
    words = np.frombuffer(matcher.compute_bitmask(), np.uint32)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("special", [False, True])
def test_they_are_those_of_llguidance(special: bool, tmp_path: Path) -> None:
    folder = write_thinking_model(tmp_path / "model")
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text(encoding="utf-8"))
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ids = {text: THINK_ID + number for number, text in enumerate(TEXTS)}
    described["added_tokens"] = [each for each in described["added_tokens"] if each["id"] < THINK_ID] + [
        {"id": token_id, "content": text, "special": special, **plain} for text, token_id in ids.items()
    ]
    file.write_text(json.dumps(described), encoding="utf-8")
    any_text = allowed(llguidance.LLTokenizer(str(file)), "start: /(?s:.*)/")
    known = load_tokenizer(folder).special_ids
    for text, token_id in ids.items():
        assert (known.get(text) == token_id) is (token_id not in any_text), text


def test_reasoning_may_end_with_its_token_though_the_tokenizer_calls_it_plain(tmp_path: Path) -> None:
    folder = write_thinking_model(tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.dialect is not None
    grammar = write_answer(AnswerContext(tokenizer.dialect, True, tokenizer.special_ids), '"yes" | "no"')
    thought = tokenizer.encode("Well", add_special_tokens=False)
    words = llguidance.LLTokenizer(str(folder / "tokenizer.json"))
    assert END_ID in allowed(words, grammar, thought)
    assert END_ID not in allowed(words, grammar, [*thought, END_ID])
