"""Bounds: no text has fewer tokens than they say, and where this cannot be known they say nothing."""

from __future__ import annotations

import sys
import unicodedata
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from gateway.text.tokenizer_files import load_tokenizer
from tests.unit.gateway.harness import demo_tokenizer
from tests.unit.gateway.text import long_texts
from tests.unit.gateway.text.long_texts import (
    BOUNDED,
    byte_level,
    hard_texts,
    vocabulary_of,
    with_added,
    with_normalizer,
)
from tests.unit.gateway.text.vocabularies import write_merges, write_sentence_piece, write_tekken

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gateway.text.vocabulary import Vocabulary

COUNT = 150
RUNS = [character * 300 for character in (" ", "\n", "a", "=", "é", "水", "🙂", "\u0301", "\x00", "▁", "e\u0301", "ſ")]


def check(vocabulary: Vocabulary) -> None:
    for text in [*hard_texts(3, COUNT), *RUNS]:
        least, token_ids = vocabulary.bounds.min_tokens(text), vocabulary.encode(text, False)
        assert least <= len(token_ids), repr(text)
        assert least > 0 or not text, "it has a bound"


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_fewer_tokens(name: str) -> None:
    check(vocabulary_of(BOUNDED[name]()))


def test_no_text_has_fewer_tokens_of_the_demo_model() -> None:
    check(demo_tokenizer().vocabulary)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_no_text_has_fewer_tokens_of_sentencepiece(kind: str, tmp_path: Path) -> None:
    write_sentence_piece(tmp_path, kind)
    check(load_tokenizer(tmp_path).vocabulary)


@pytest.mark.parametrize("config", [{}, {"tokenizer_class": "Qwen2Tokenizer"}])
def test_no_text_has_fewer_tokens_of_gpt2s_files(config: dict[str, Any], tmp_path: Path) -> None:
    write_merges(tmp_path, **config)
    check(load_tokenizer(tmp_path).vocabulary)


def test_no_text_has_fewer_tokens_of_tekken(tmp_path: Path) -> None:
    write_tekken(tmp_path)
    check(load_tokenizer(tmp_path).vocabulary)


def test_a_bound_is_reached_by_the_longest_token() -> None:
    tokenizer = demo_tokenizer()
    longest = max(tokenizer.backend.get_vocab(with_added_tokens=False), key=len).replace("Ġ", " ")
    assert set(longest) == {" "}
    assert tokenizer.min_tokens(longest) == 1
    assert tokenizer.min_tokens(f"{longest} ") == 2
    assert tokenizer.min_tokens("a" * len(longest)) == 2, "no token has as many letters"


def test_no_character_is_composed_of_more_than_is_counted() -> None:
    longest = max(len(unicodedata.normalize("NFD", chr(code))) for code in range(sys.maxunicode + 1))
    assert longest == 4


def word_level(pre_tokenizer: Any = None, **settings: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "[UNK]": 2}, merges=[], **settings))
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    return backend


def without_the_text() -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(
        single="<s>", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


UNBOUNDED: dict[str, tuple[Callable[[], tokenizers.Tokenizer], str]] = {
    "accents are dropped": (lambda: with_normalizer(normalizers.StripAccents()), "\u0301" * 500),
    "ends are stripped": (lambda: with_normalizer(normalizers.Strip()), " " * 500),
    "a run becomes one": (lambda: with_normalizer(normalizers.Replace(tokenizers.Regex(" +"), " ")), " " * 500),
    "a text is removed": (lambda: with_normalizer(normalizers.Replace("a", "")), "a" * 500),
    "words that are too long": (long_texts.word_piece, "a" * 500),
    "no piece, and nothing unknown": (word_level, "c" * 500),
    "unknown ones are joined": (lambda: word_level(unk_token="[UNK]", fuse_unk=True), "c" * 500),
    "white space is dropped": (lambda: word_level(pre_tokenizers.Whitespace(), unk_token="[UNK]"), " " * 500),
    "what splits is removed": (lambda: word_level(pre_tokenizers.Split("b", "removed"), unk_token="[UNK]"), "b" * 500),
    "the template leaves it out": (without_the_text, "a" * 500),
    "a token takes the space": (lambda: with_added(AddedToken("<m>", lstrip=True)), " " * 500 + "<m>"),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_where_a_long_text_may_be_few_tokens_nothing_is_said(name: str) -> None:
    make, text = UNBOUNDED[name]
    vocabulary = vocabulary_of(make())
    assert len(vocabulary.encode(text, True)) < 100, "it is no example"
    assert vocabulary.bounds.min_tokens(text) == 0


def test_of_a_model_that_normalizes_by_tables_nothing_is_said(tmp_path: Path) -> None:
    write_sentence_piece(tmp_path, "unigram")
    assert load_tokenizer(tmp_path).min_tokens("a" * 500) == 0


def test_a_token_that_takes_space_matters_where_it_stands_alone() -> None:
    vocabulary = vocabulary_of(with_added(AddedToken("<m>", lstrip=True)))
    assert vocabulary.bounds.min_tokens(" " * 500) > 0


def test_what_is_composed_first_counts_as_it_was_sent() -> None:
    letter = "\u1f82"
    model = models.BPE(vocab={"?": 0, letter: 1, letter * 2: 2}, merges=[(letter, letter)], unk_token="?")
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.NFC()
    vocabulary, text = vocabulary_of(backend), unicodedata.normalize("NFD", letter * 2)
    assert (len(text), len(vocabulary.encode(text, False)), vocabulary.bounds.min_tokens(text)) == (8, 1, 1)
    assert vocabulary.bounds.min_tokens(f"{text}a") == 2
