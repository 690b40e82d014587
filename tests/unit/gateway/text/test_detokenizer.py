from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from blockyard.panics import ExtensionPanic
from gateway.text.detokenizer import ByteDetokenizer, DetokenizerFactory, WindowDetokenizer
from tests.kit.panics import panic
from tests.unit.gateway.harness import demo_tokenizer

if TYPE_CHECKING:
    from gateway.text.detokenizer import Detokenizer

WORDS = ["▁the", "▁cat", "▁", "s", "▁sat", "é", "▁日", "本", "▁ab", "c", ".", "!", "\n"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2's kind: every byte, some merged words, special and plain added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "Ġthe", "Ġcat", "âĤ¬", "ðŁĺ", "Ģ"[:1], "Ã©"]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("héllo wörld", normalized=False)])
    return tokenizer


def llama() -> tokenizers.Tokenizer:
    """Sentencepiece with byte fallback, as Llama 2 and Mistral have it: the first space of a text is dropped."""
    pieces = ["<unk>", "<s>", "</s>", *BYTES, *WORDS]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """Sentencepiece without bytes, as T5 has it."""
    tokenizer = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), *((word, -1.0) for word in WORDS)], 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<pad>", "</s>"])
    return tokenizer


def wordpiece() -> tokenizers.Tokenizer:
    """BERT's kind, which removes spaces before punctuation."""
    pieces = ["[UNK]", "the", "cat", "##s", "sat", ".", "!", "##é", "'", "s", "do", "n't"]
    tokenizer = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    return tokenizer


def word_suffixes() -> tokenizers.Tokenizer:
    """The first BPE's kind: a word's last piece says so, and the text's last word gets no space."""
    pieces = ["the</w>", "ca", "t</w>", "s</w>", "sat</w>", ".</w>"]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


def plain() -> tokenizers.Tokenizer:
    """No decoder: pieces joined by spaces."""
    return tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))


def byte_level_and_more() -> tokenizers.Tokenizer:
    """A byte-level decoder among others, whose table of bytes would not be the whole truth."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("e", "E")])
    return tokenizer


KINDS = [byte_level, llama, metaspace, wordpiece, word_suffixes, plain, byte_level_and_more]


@functools.cache
def made(kind: str) -> tuple[tokenizers.Tokenizer, DetokenizerFactory]:
    backend = next(make for make in KINDS if make.__name__ == kind)()
    return backend, DetokenizerFactory(backend)


def pieces_of(detokenizer: Detokenizer, groups: list[list[int]]) -> list[str]:
    return [*(detokenizer.push(group) for group in groups), detokenizer.flush()]


def grouped(token_ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Cuts ids into groups of these sizes; the rest comes one by one."""
    groups: list[list[int]] = []
    start = 0
    for size in sizes:
        groups.append(token_ids[start : start + size])
        start += size
    return [*groups, *([token_id] for token_id in token_ids[start:])]


@pytest.mark.parametrize("kind", [make.__name__ for make in KINDS])
@given(st.data(), st.booleans(), st.lists(st.integers(0, 9), max_size=6))
@settings(max_examples=150)
def test_the_pieces_are_the_decoding_of_the_whole(kind: str, data: st.DataObject, skip: bool, sizes: list[int]) -> None:
    backend, factory = made(kind)
    token_ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() + 2), max_size=40))
    pieces = pieces_of(factory.make(skip_special_tokens=skip), grouped(token_ids, sizes))
    assert "".join(pieces) == backend.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_level", "llama", "metaspace", "plain"])
@given(st.data())
def test_the_bytes_of_tokens_are_what_they_add_to_a_text(kind: str, data: st.DataObject) -> None:
    backend, factory = made(kind)
    # Bytes alone are no characters, and a text that begins with a special token has not begun yet.
    known = [i for i in range(backend.get_vocab_size()) if not str(backend.id_to_token(i)).startswith("<0x")]
    texts = [i for i in known if "\ufffd" not in backend.decode([i]) and backend.decode([i]).strip()]
    first = data.draw(st.sampled_from(texts))
    others = data.draw(st.lists(st.sampled_from(known), max_size=20))
    added = b"".join(map(factory.bytes_of, others))
    assert backend.decode([first, *others]) == backend.decode([first]) + added.decode(errors="replace")


def test_the_bytes_of_a_token_are_a_part_of_a_character() -> None:
    for kind, pieces in (("byte_level", ["â", "Ĥ", "¬"]), ("llama", ["<0xE2>", "<0x82>", "<0xAC>"])):
        backend, factory = made(kind)
        token_ids = [backend.token_to_id(piece) for piece in pieces]
        assert None not in token_ids
        assert [factory.bytes_of(token_id) for token_id in token_ids] == [b"\xe2", b"\x82", b"\xac"]


@pytest.mark.parametrize("kind", [make.__name__ for make in KINDS])
def test_special_tokens_and_unknown_ids_have_the_bytes_that_are_returned(kind: str) -> None:
    backend, factory = made(kind)
    assert factory.bytes_of(backend.get_vocab_size()) == b""
    for token_id, token in backend.get_added_tokens_decoder().items():
        if token.special:
            assert factory.bytes_of(token_id) == b""
            assert factory.bytes_of(token_id, skip_special_tokens=False).decode().strip() == token.content


@given(st.text(max_size=60), st.lists(st.integers(0, 9), max_size=6))
@example("wörld 😀 👩‍👩‍👧 日本", [])
def test_real_text_comes_out_as_it_went_in_and_never_in_half_characters(text: str, sizes: list[int]) -> None:
    tokenizer = demo_tokenizer()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(token_ids)
    pieces = pieces_of(tokenizer.make_detokenizer((), skip_special_tokens=True), grouped(token_ids, sizes))
    assert "".join(pieces) == whole
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


@given(st.lists(st.integers(0, 4095), max_size=60), st.booleans())
def test_any_ids_of_the_demo_model_are_decoded_exactly(token_ids: list[int], skip: bool) -> None:
    tokenizer = demo_tokenizer()
    pieces = pieces_of(tokenizer.make_detokenizer((), skip_special_tokens=skip), [[i] for i in token_ids])
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@given(st.lists(st.binary(min_size=1, max_size=6), max_size=12))
def test_broken_utf8_becomes_what_the_whole_decoding_makes_of_it(contents: list[bytes]) -> None:
    backend, factory = made("byte_level")
    of_byte = {byte: character for character, byte in _characters().items()}
    ids = [[backend.token_to_id(of_byte[byte]) for byte in content] for content in contents]
    pieces = pieces_of(factory.make(), ids)
    assert "".join(pieces) == b"".join(contents).decode(errors="replace")
    assert "".join(pieces) == backend.decode([i for group in ids for i in group])


def _characters() -> dict[str, int]:
    from gateway.text.detokenizer import byte_of_character

    return byte_of_character()


def test_byte_level_is_read_from_a_table_and_others_by_windows() -> None:
    assert isinstance(made("byte_level")[1].make(), ByteDetokenizer)
    assert isinstance(made("byte_level_and_more")[1].make(), WindowDetokenizer)
    assert isinstance(made("llama")[1].make(), WindowDetokenizer)


def test_an_incomplete_character_at_the_end_is_flushed() -> None:
    backend, factory = made("byte_level")
    detokenizer = factory.make()
    assert detokenizer.push([backend.token_to_id("ðŁĺ")]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_a_sequence_that_continues_a_text_keeps_its_first_space() -> None:
    backend, factory = made("llama")
    the, cat, begin, byte = (backend.token_to_id(piece) for piece in ("▁the", "▁cat", "<s>", "<0x41>"))
    assert factory.make([begin, the]).push([cat]) == " cat"
    assert factory.make([the, begin]).push([cat]) == "cat"
    assert factory.make([the, byte]).push([cat]) == "cat"
    assert factory.make([]).push([cat]) == "cat"


def test_a_run_of_fallback_bytes_waits_for_its_end() -> None:
    backend, factory = made("llama")
    detokenizer = factory.make()
    smile = [backend.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()]
    assert [detokenizer.push([i]) for i in smile] == ["", "", "", ""]
    assert detokenizer.push([backend.token_to_id("c")]) == "😀c"


def test_the_window_stays_small() -> None:
    backend, factory = made("llama")
    detokenizer = factory.make()
    assert isinstance(detokenizer, WindowDetokenizer)
    for _ in range(100):
        detokenizer.push([backend.token_to_id("▁cat"), backend.token_to_id("<0x41>"), backend.token_to_id("s")])
    assert len(detokenizer._window) <= 8


class Panics:
    """A library's tokenizer that panics whatever it is asked for."""

    def decode(self, *arguments: Any, **options: Any) -> str:
        panic()
        return ""


def test_a_panic_of_the_library_is_an_error() -> None:
    detokenizer = WindowDetokenizer(
        Panics(),  # type: ignore[arg-type]
        frozenset({1}),
        byte_ids=set(),
        holds_incomplete=False,
    )
    with pytest.raises(ExtensionPanic):
        detokenizer.push([1])
