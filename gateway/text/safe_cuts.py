"""Finds places at which a long text can be cut so that encoding the parts gives the same tokens as the whole text.

A place is between a letter and a space that another letter follows (all three in ASCII). It is safe if nothing that the
tokenizer matches reaches across it. That is only decided for known kinds of tokenizer steps; with any other tokenizer
there are no places, and texts are encoded in one piece.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from gateway.text.text_bounds import flatten

if TYPE_CHECKING:
    from collections.abc import Iterable

Json = dict[str, Any]

# Normalizers that neither join characters across a place nor drop characters around it.
_LOCAL_NORMALIZERS = frozenset({"NFC", "NFKC", "NFD", "NFKD", "Lowercase", "BertNormalizer", "StripAccents"})
_WORD_CUTTERS = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})
# The known alternatives in the patterns by which byte-level vocabularies split words. The alternatives for letters may
# take one character before a word, and end at a space. No other alternative matches a letter, except in English endings
# such as 's. None looks behind, and a lookahead covers one character.
_CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LETTERS = frozenset(
    {
        r" ?\p{L}+",
        *(rf"[^\r\n\p{{L}}\p{{N}}]?{letters}" for letters in (r"\p{L}+", r"[\p{L}\p{M}]+")),
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?{_CASED[0]}{first}{_CASED[1]}{second}{ending}"
            for first, second in (("*", "+"), ("+", "*"))
            for ending in ("", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?")
        ),
    }
)
_OTHERS = frozenset(
    {
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
        *("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)", "(?i:[sdmt]|ll|ve|re)"),
        *(r"\p{N}", r"\p{N}+", r" ?\p{N}+", r"\p{N}{1,2}", r"\p{N}{1,3}"),
        *(rf" ?[^\s\p{{L}}\p{{N}}]+{behind}" for behind in ("", r"[\r\n]*", r"[\r\n/]*")),
        *(r"\s*[\r\n]+", r"[\r\n]+", r"\s+(?!\S)", r"[^\S\r\n]+(?!\S)", r"\s+"),
    }
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PLACE = re.compile(r"[A-Za-z](?= [A-Za-z])")
_ACROSS = re.compile(r"[A-Za-z][ ▁]")
# The number of characters searched at once, since a search holds the interpreter's lock.
_STRETCH = 65_536


class SafeCuts:
    """Finds the places of one text at a time. Safe to call from several threads."""

    def behind(self, text: str, start: int) -> int:
        """Returns the first safe place after a position; the text's end if there is none."""
        while start < len(text):
            # The pattern also matches the two characters after a place.
            if found := _PLACE.search(text, start, start + _STRETCH + 2):
                return found.end()
            start += _STRETCH
        return len(text)

    def before(self, text: str, end: int) -> int:
        """Returns the last safe place at or before a position; 0 if there is none."""
        while end > 0:
            start = max(0, end - _STRETCH)
            if places := [found.end() for found in _PLACE.finditer(text, start, end + 2)]:
                return places[-1]
            end = start
        return 0


def cuts_of(description: Json, pieces: Iterable[str]) -> SafeCuts | None:
    """Returns the finder for a tokenizer, from the tokenizer's own description (`to_str`); None: no place is safe."""
    normalizer = list(flatten(description.get("normalizer"), "normalizers"))
    cutting = list(flatten(description.get("pre_tokenizer"), "pretokenizers"))
    if any(map(_reaches_across, description["added_tokens"])):
        return None
    is_local = all(step["type"] in _LOCAL_NORMALIZERS for step in normalizer)
    # The first pre-tokenizer splits words, and later steps only see single words.
    if is_local and cutting and _cuts_at_spaces(cutting[0]):
        return SafeCuts()
    return SafeCuts() if _merges_within_words(description["model"], normalizer, cutting, pieces) else None


def _reaches_across(token: Json) -> bool:
    """Returns whether an added token may lie on both sides of a place, or depends on the text beyond it."""
    content = token["content"]
    ends_in_letter = content[-1:].isascii() and content[-1:].isalpha()
    return (
        _ACROSS.search(content) is not None
        or (token["rstrip"] and ends_in_letter)
        or (token["single_word"] and content[:1].isspace())
        # Its normalized form may contain a space.
        or (token["normalized"] and not content.isascii())
    )


def _cuts_at_spaces(step: Json) -> bool:
    """Returns whether a pre-tokenizer step always begins a new word at a place."""
    if step["type"] in _WORD_CUTTERS:
        return True
    if step["type"] == "ByteLevel":
        return step["use_regex"] and _is_known(_GPT2)
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"]:
        return False
    return _is_known(step["pattern"].get("Regex", ""))


def _is_known(pattern: str) -> bool:
    alternatives = _alternatives(pattern)
    return alternatives <= _LETTERS | _OTHERS and not alternatives.isdisjoint(_LETTERS)


def _alternatives(pattern: str) -> set[str]:
    """Splits a pattern at each `|` that is outside of parentheses."""
    parts, depth = [""], 0
    for character in pattern:
        depth += (character == "(") - (character == ")")
        if character == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return set(parts)


def _merges_within_words(model: Json, normalizer: list[Json], cutting: list[Json], pieces: Iterable[str]) -> bool:
    """Returns whether the whole text is one word, and no merge joins a letter and the space after it, as in Gemma."""
    is_spelled = [(step["type"], step.get("pattern"), step.get("content")) for step in normalizer] == [
        ("Replace", {"String": " "}, "▁")
    ]
    # The normalizer has replaced all spaces, so that a split at spaces has no effect.
    is_whole = all(step["type"] == "Split" and step["pattern"] == {"String": " "} for step in cutting)
    if not (is_spelled and is_whole and model.get("type") == "BPE") or model.get("ignore_merges"):
        return False
    if model.get("dropout") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    pieces = set(pieces)
    return "▁" in pieces and not any(map(_ACROSS.search, pieces))
