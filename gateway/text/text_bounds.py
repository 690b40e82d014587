"""Computes a lower bound of a text's number of tokens without encoding it: its length divided by the longest token's.

Texts are refused because of these bounds, so a bound must hold for every text, or is 0. A tokenizer has no bound if it
drops characters, or joins runs of any length into one token (white space, unknown characters, words that are too long
for WordPiece).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.text.detokenizer import byte_of_character

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import tokenizers

Json = dict[str, Any]

_NOT_LETTERS = bytes(byte for byte in range(256) if not (byte < 128 and chr(byte).isalnum()))
# Normalizers that replace each character with one or more.
_EXPANDING = frozenset({"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"})
# Normalizers that compose canonical decompositions, the longest of which have 4 characters (for example of U+1F82).
_COMPOSING = frozenset({"NFC", "NFKC"})
_COMPOSED_CHARACTERS = 4
# Pre-tokenizers that split texts without dropping characters. `_keeps` decides about others by their behavior.
_KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"})
_BYTE_PIECES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


class Cover(NamedTuple):
    """The most characters of a text that one token covers; `letters`: ASCII letters and digits alone. 0: unknown."""

    characters: int = 0
    letters: int = 0


_UNKNOWN = Cover()


@dataclass(frozen=True, slots=True)
class TextBounds:
    """The bounds of one tokenizer.

    Attributes:
        ascii, any: the covers for texts of only ASCII, and for all texts.
        absorbing: added tokens that take the white space next to them. A text that contains one has no bound.
    """

    ascii: Cover = _UNKNOWN
    any: Cover = _UNKNOWN
    absorbing: tuple[str, ...] = ()

    def min_tokens(self, text: str, enough: int | None = None) -> int:
        """Returns a lower bound of a text's tokens, without added special tokens; 0: unknown.

        `enough`: a bound that suffices for the caller; a greater one need not be computed.
        """
        cover = self.ascii if text.isascii() else self.any
        if not cover.characters or any(token in text for token in self.absorbing):
            return 0
        by_characters = math.ceil(len(text) / cover.characters)
        if not cover.letters or (enough is not None and by_characters >= enough):
            return by_characters
        num_letters = len(text.encode(errors="replace").translate(None, _NOT_LETTERS))
        return max(by_characters, math.ceil(num_letters / cover.letters))


NO_BOUNDS = TextBounds()


def bounds_of_backend(backend: tokenizers.Tokenizer, description: Json) -> TextBounds:
    """Returns the bounds of a tokenizer that encodes, from the tokenizer's own description (`to_str`)."""
    normalizer = list(flatten(description.get("normalizer"), "normalizers"))
    cutting = list(flatten(description.get("pre_tokenizer"), "pretokenizers"))
    pieces: set[str] = set(backend.get_vocab(with_added_tokens=False))
    added: list[Json] = description["added_tokens"]
    is_plain = all(map(_keeps, cutting)) and all(map(_keeps_texts, _processors(description)))
    if not is_plain or not _has_piece_for_all(description["model"], normalizer, cutting, pieces):
        return NO_BOUNDS
    if normalizer and any(token["normalized"] and _absorbs(token) for token in added):
        # These tokens are found in the normalized text, which is not known here.
        return NO_BOUNDS
    normalize = backend.normalizer.normalize_str if backend.normalizer is not None else str
    texts = [*pieces, *(token["content"] for token in added)]
    texts += [normalize(token["content"]) for token in added if token["normalized"]]
    longest, letters = _measure(texts)
    bounds = (_cover(normalizer, longest, letters, is_ascii) for is_ascii in (True, False))
    return TextBounds(*bounds, absorbing=tuple(token["content"] for token in added if _absorbs(token)))


def bounds_of_sentence_piece(model: Any, named: Mapping[int, tokenizers.AddedToken]) -> TextBounds:
    """Returns the bounds of a `tokenizer.model`. `named`: by id, the tokens at which texts are split first."""
    normalizer = model.normalizer_spec
    pieces = {str(piece.piece) for piece in model.pieces}
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces or not pieces >= _BYTE_PIECES:
        return NO_BOUNDS
    if not model.trainer_spec.byte_fallback:
        return NO_BOUNDS
    cover = Cover(*_measure([*pieces, *(token.content for token in named.values())]))
    absorbing = (token.content for token in named.values() if token.lstrip or token.rstrip)
    return TextBounds(cover, cover, tuple(absorbing))


def flatten(step: Json | None, inner: str) -> Iterator[Json]:
    """Yields the steps of a tokenizer's component. `inner`: the field with the steps in a Sequence."""
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for each in step[inner]:
        yield from flatten(each, inner)


def _processors(description: Json) -> Iterator[Json]:
    return flatten(description.get("post_processor"), "processors")


def _measure(texts: Iterable[str]) -> tuple[int, int]:
    """Returns the largest number of characters, and of ASCII letters and digits, in any of the texts; at least 1."""
    longest = letters = 1
    for text in texts:
        longest = max(longest, len(text))
        if len(text) > letters:
            letters = max(letters, len(text.encode(errors="replace").translate(None, _NOT_LETTERS)))
    return longest, letters


def _cover(normalizer: list[Json], longest: int, letters: int, is_ascii: bool) -> Cover:
    """Returns the most characters of an unnormalized text that one token covers."""
    factor = 1
    for place, step in enumerate(normalizer):
        if step["type"] in _COMPOSING:
            # Composing does not change ASCII, unless an earlier step has inserted other characters.
            if not (is_ascii and place == 0):
                factor *= _COMPOSED_CHARACTERS
                letters = 0
        elif step["type"] == "Replace" and (replaced := step["pattern"].get("String")) and step["content"]:
            factor *= math.ceil(len(replaced) / len(step["content"]))
            letters = 0 if any(character.isalnum() for character in replaced) else letters
        elif step["type"] not in _EXPANDING:
            return _UNKNOWN
    return Cover(longest * factor, letters)


def _keeps(step: Json) -> bool:
    """Returns whether a pre-tokenizer step keeps all characters."""
    if step["type"] in ("Split", "Punctuation"):
        return step["behavior"] != "Removed"
    return step["type"] in _KEEPING


def _keeps_texts(step: Json) -> bool:
    """Returns whether a post-processor step keeps all tokens of the text."""
    if step["type"] != "TemplateProcessing":
        return step["type"] in ("ByteLevel", "BertProcessing", "RobertaProcessing")
    return all(
        {"A", *second} <= {part["Sequence"]["id"] for part in step[name] if "Sequence" in part}
        for name, second in (("single", ""), ("pair", "B"))
    )


def _has_piece_for_all(model: Json, normalizer: list[Json], cutting: list[Json], pieces: set[str]) -> bool:
    """Returns whether every character becomes a part of a token, and no token covers more than its piece's text."""
    kind = model.get("type")
    if kind not in ("BPE", "Unigram"):
        return False
    if model.get("byte_fallback") and pieces >= _BYTE_PIECES:
        return True
    if kind != "BPE":
        return False
    # After a ByteLevel step, the model only gets bytes, each of which must be a piece.
    last = cutting[-1:] or normalizer[-1:]
    if last and last[0]["type"] == "ByteLevel" and pieces >= byte_of_character().keys():
        return True
    return bool(model.get("unk_token")) and not model.get("fuse_unk")


def _absorbs(token: Json) -> bool:
    return token["lstrip"] or token["rstrip"]
