"""Slices: a text that is encoded part by part, or from one of its ends alone, has the tokens of the whole."""

from __future__ import annotations

import random
from array import array
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers

from gateway.pooling.inputs import encode_pair
from gateway.text import safe_cuts
from gateway.text import vocabulary as module
from gateway.text.encoding import run_steps
from gateway.text.vocabulary import encode_steps, find_specials
from tests.unit.gateway.harness import demo_tokenizer
from tests.unit.gateway.text.long_texts import (
    CUT,
    CUT_ONLY,
    byte_level,
    gemma,
    hard_texts,
    split,
    vocabulary_of,
    with_added,
    with_normalizer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.text.vocabulary import Vocabulary

COUNT = 120
EVERY = CUT | CUT_ONLY


@pytest.fixture(params=[*EVERY, "demo"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return demo_tokenizer().vocabulary if request.param == "demo" else vocabulary_of(EVERY[request.param]())


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_CHARACTERS", 12)
    monkeypatch.setattr(safe_cuts, "_STRETCH", 5)


def test_slices_have_the_tokens_of_the_whole(vocabulary: Vocabulary) -> None:
    num_slices = 0
    for seed, text in enumerate(hard_texts(7, COUNT)):
        whole = vocabulary.encode(text, specials := bool(seed % 2))
        steps = encode_steps(vocabulary, text, add_special_tokens=specials)
        sizes = [next(steps)]
        while True:
            try:
                sizes.append(next(steps))
            except StopIteration as stop:
                encoded = stop.value
                break
        assert list(encoded.token_ids) == list(whole), repr(text)
        assert encoded.is_whole
        assert sum(sizes) == len(text)
        num_slices += len(sizes)
    assert num_slices > 4 * COUNT, "they are hardly cut"


def test_the_ends_of_a_text_have_the_tokens_of_the_whole(vocabulary: Vocabulary) -> None:
    rng, num_parts = random.Random(1), 0
    for text in hard_texts(8, COUNT):
        whole = array("I", vocabulary.encode(text, True))
        for from_end in (False, True):
            enough = rng.randint(1, 20)
            encoded = run_steps(encode_steps(vocabulary, text, enough=enough, from_end=from_end))
            num_parts += not encoded.is_whole
            if from_end:
                assert encoded.token_ids[-enough:] == whole[-enough:], repr(text)
            else:
                assert encoded.token_ids[:enough] == whole[:enough], repr(text)
            assert encoded.is_whole == (encoded.token_ids == whole)
    assert num_parts > COUNT / 4, "they are hardly cut"


@pytest.mark.parametrize("side", ["left", "right"])
def test_pairs_that_are_cut_are_those_of_the_whole(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, rng = vocabulary_of(byte_level()), random.Random(2)
    texts = list(hard_texts(9, 40))
    for first in texts:
        second, limit = rng.choice([None, *texts]), rng.randint(4, 60)
        options: dict[str, Any] = {"max_tokens": limit, "side": side, "add_special_tokens": rng.random() < 0.5}
        sliced = run_steps(encode_pair(vocabulary, first, second, **options))
        with monkeypatch.context() as patch:
            patch.setattr(module, "SLICE_CHARACTERS", 10**9)
            assert sliced == run_steps(encode_pair(vocabulary, first, second, **options))


def test_no_more_is_encoded_than_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def encode(backend: tokenizers.Tokenizer, text: str, specials: bool = False) -> tokenizers.Encoding:
        seen.append(text)
        return backend.encode(text, add_special_tokens=specials)

    monkeypatch.setattr(module, "encode_text", encode)
    text = "a cat sat " * 1000
    encoded = run_steps(encode_steps(demo_tokenizer().vocabulary, text, add_special_tokens=False, enough=10))
    assert 10 <= len(encoded.token_ids) < 20
    assert text.startswith("".join(seen))
    assert sum(map(len, seen)) < 100


def foreign_pattern() -> tokenizers.Tokenizer:
    return byte_level(split(r"\p{L}+ \p{L}+|\s+|\S+"))


def backward() -> tokenizers.Tokenizer:
    return byte_level(split(r"(?<=a) ?\p{L}+|\s+|\S+"))


UNSAFE: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "words that are not known": foreign_pattern,
    "words that look back": backward,
    "a token across": lambda: with_added(AddedToken("cat sat")),
    "a token that takes the space behind": lambda: with_added(AddedToken("cat", rstrip=True)),
    "a token that is a word with its space": lambda: with_added(AddedToken(" cat", single_word=True)),
    "a token that becomes one across": lambda: with_added(AddedToken("cat\u00a0sat", normalized=True)),
    "a beginning of its own": lambda: with_normalizer(normalizers.Prepend("_")),
    "merges across": lambda: gemma(crosses=True),
    "words of two": lambda: byte_level(pre_tokenizers.Split(" ", "merged_with_next")),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_what_may_reach_across_is_encoded_whole(name: str) -> None:
    vocabulary = vocabulary_of(UNSAFE[name]())
    assert vocabulary.cuts is None
    text = "a cat sat " * 100
    assert list(encode_steps(vocabulary, text)) == [len(text)]


def test_special_tokens_at_both_ends_are_found() -> None:
    backend = byte_level()
    before, behind = find_specials(backend)
    assert [backend.id_to_token(token_id) for token_id in (*before, *behind)] == ["<s>", "</s>"]
