"""Tokenizers of models without tokenizer.json: their ids and texts are those of the libraries that trained them."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import sentencepiece
import tiktoken

from blockyard.errors import BlockyardError, Reason
from gateway.text.tokenizer_files import load_tokenizer
from tests.unit.gateway.text.vocabularies import (
    NUM_SPECIALS,
    PATTERN,
    SENTENCE_PIECE,
    ranks,
    sentence_piece,
    texts,
    write_merges,
    write_sentence_piece,
    write_tekken,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gateway.text.tokenizer import Tokenizer

COUNT = 150


def streamed(tokenizer: Tokenizer, token_ids: Sequence[int], seed: int) -> str:
    """What a stream says of ids that come in groups of any size."""
    rng, detokenizer, parts, start = random.Random(seed), tokenizer.make_detokenizer(), list[str](), 0
    while start < len(token_ids):
        stop = start + rng.randint(1, 5)
        parts.append(detokenizer.push(token_ids[start:stop]))
        start = stop
    return "".join([*parts, detokenizer.flush()])


def read(kind: str) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=sentence_piece(kind))


@pytest.mark.parametrize("kind", SENTENCE_PIECE)
def test_ids_and_texts_are_those_of_sentencepiece(kind: str, tmp_path: Path) -> None:
    write_sentence_piece(tmp_path, kind)
    tokenizer, truth = load_tokenizer(tmp_path), read(kind)
    for seed, text in enumerate(texts(1, COUNT)):
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert token_ids == truth.encode(text)
        assert tokenizer.encode(text) == [truth.bos_id(), *token_ids]
        decoded = truth.decode(token_ids)
        assert tokenizer.decode(token_ids) == decoded
        assert streamed(tokenizer, token_ids, seed) == decoded


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_any_ids_stream_as_the_text_of_the_whole(kind: str, tmp_path: Path) -> None:
    write_sentence_piece(tmp_path, kind)
    tokenizer, rng = load_tokenizer(tmp_path), random.Random(2)
    for seed in range(COUNT):
        token_ids = rng.choices(range(tokenizer.vocab_size), k=30)
        assert streamed(tokenizer, token_ids, seed) == tokenizer.decode(token_ids)


def test_a_special_token_in_a_text_is_its_id_and_what_lies_between_is_encoded_alone(tmp_path: Path) -> None:
    added = {"460": {"content": "<|user|>", "special": True}, "461": {"content": "<tool>", "special": False}}
    write_sentence_piece(tmp_path, "llama", added_tokens_decoder=added)
    tokenizer, truth = load_tokenizer(tmp_path), read("llama")
    inner = truth.encode("the cat")
    assert tokenizer.encode("the cat</s><|user|><tool>the cat", False)[: len(inner) + 3] == [*inner, 2, 460, 461]
    # Behind a special token no word begins, but where the file says so.
    assert tokenizer.encode("<s>the cat", False) != [1, *inner]
    assert tokenizer.encode("<s> the cat", False) == [1, *inner]
    write_sentence_piece(tmp_path, "llama", legacy=True)
    assert load_tokenizer(tmp_path).encode("<s>the cat", False) == [1, *inner]
    assert tokenizer.decode([460, *inner, 461, 2]) == "the cat<tool>"
    assert tokenizer.decode([460, *inner, 461, 2], skip_special_tokens=False) == "<|user|> the cat<tool></s>"


def test_tokens_that_were_added_in_the_older_way_are_found(tmp_path: Path) -> None:
    write_sentence_piece(tmp_path, "llama", pad_token="<pad>")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": 460, "<tool>": 461}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("<pad><tool>", False) == [460, 461]
    assert tokenizer.decode([460, 461]) == "<tool>"


def test_control_pieces_of_the_model_are_special_tokens_and_its_own_symbols_are_not(tmp_path: Path) -> None:
    write_sentence_piece(tmp_path, "gemma", add_bos_token=False, add_eos_token=True)
    tokenizer, truth = load_tokenizer(tmp_path), read("gemma")
    begin, mask = truth.piece_to_id("[INST]"), truth.piece_to_id("<mask>")
    token_ids = tokenizer.encode("[INST]the <mask>")
    assert token_ids == [begin, *truth.encode("the <mask>"), truth.eos_id()]
    assert mask in token_ids
    assert tokenizer.decode(token_ids) == "the <mask>"


def test_messages_are_rendered_and_encoded_as_one_text(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
    write_sentence_piece(tmp_path, "gemma", chat_template=template)
    tokenizer, truth = load_tokenizer(tmp_path), read("gemma")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "the cat"}])
    ends = [truth.piece_to_id(piece) for piece in ("[INST]", "[/INST]")]
    expected = [truth.bos_id(), ends[0], *truth.encode(" the cat "), ends[1]]
    assert tokenizer.encode(rendered, add_special_tokens=False) == expected
    assert truth.eos_id() in tokenizer.end_token_ids


@pytest.mark.parametrize("lists_specials", [False, True])
def test_ids_and_texts_of_tekken_are_those_of_tiktoken(lists_specials: bool, tmp_path: Path) -> None:
    write_tekken(tmp_path, lists_specials=lists_specials)
    tokenizer = load_tokenizer(tmp_path)
    truth = tiktoken.Encoding("truth", pat_str=PATTERN, mergeable_ranks=ranks(), special_tokens={})
    for seed, text in enumerate(texts(3, COUNT)):
        expected = [token_id + NUM_SPECIALS for token_id in truth.encode_ordinary(text)]
        assert tokenizer.encode(text, add_special_tokens=False) == expected
        assert tokenizer.encode(text) == [1, *expected]
        assert streamed(tokenizer, expected, seed) == tokenizer.decode(expected) == text
    word = [token_id + NUM_SPECIALS for token_id in truth.encode_ordinary("cat")]
    assert tokenizer.encode("[INST]cat<SPECIAL_29>", False) == [3, *word, 29]
    assert tokenizer.decode([1, *word, 4]) == ("cat[THINK]" if lists_specials else "cat")


@pytest.mark.parametrize("config", [{}, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}])
def test_ids_of_gpt2s_files_are_those_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    begin = write_merges(tmp_path, bos_token="</s>", add_bos_token=True, **config)
    tokenizer = load_tokenizer(tmp_path)
    truth = GPT2Tokenizer.from_pretrained(tmp_path)
    for text in [*texts(4, COUNT), "a<tool> b</s>c"]:
        assert tokenizer.encode(text, False) == truth.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text)[0] == begin


@pytest.mark.parametrize(
    ("file", "config", "told"),
    [
        ("tokenizer.model", {"tokenizer_class": "T5Tokenizer"}, "of a T5Tokenizer and no tokenizer.json: convert it"),
        ("vocab.json", {"tokenizer_class": "RobertaTokenizer"}, "of a RobertaTokenizer"),
        ("tokenizer.model", {}, "damaged"),
        ("tekken.json", {}, "damaged"),
        ("vocab.json", {}, "damaged"),
        ("vocab.txt", {}, "has no tokenizer, which is one of tokenizer.json, tekken.json"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(file: str, config: dict[str, Any], told: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / file).write_bytes(b"\x0anothing")
    with pytest.raises(BlockyardError) as raised:
        load_tokenizer(tmp_path)
    assert raised.value.reason is Reason.MODEL_NOT_LOADED
    assert told in raised.value.message
    assert file in raised.value.message or file == "vocab.txt"
