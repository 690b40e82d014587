"""Finds places at which a long text can be cut, so that the tokens of its parts are those of the whole.

A place is between a letter and a space that another letter follows (ASCII all three). It is safe where nothing that a
tokenizer looks for reaches across it, which is read off a description that is known; any other tokenizer has no such
places, and its texts are encoded whole.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from gateway.text.text_bounds import flatten

if TYPE_CHECKING:
    from collections.abc import Iterable

Json = dict[str, Any]

# Neither joins characters across a place, nor drops any before looking at both sides.
_LOCAL_NORMALIZERS = frozenset({"NFC", "NFKC", "NFD", "NFKD", "Lowercase", "BertNormalizer", "StripAccents"})
_WORD_CUTTERS = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})
# Alternatives of the patterns by which byte-level vocabularies cut words. Those of letters take what precedes a word
# and end at a space; no other one has a letter, but for the endings of English. None looks back, and what looks ahead
# looks at one character.
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
# The characters of one search, which holds the interpreter's lock.
_STRETCH = 65_536


class SafeCuts:
    """Finds the places of one text at a time. Safe to call from several threads."""

    def behind(self, text: str, start: int) -> int:
        """Returns the first place behind a position; the text's end where there is none."""
        while start < len(text):
            # A place is recognized by two characters behind it.
            if found := _PLACE.search(text, start, start + _STRETCH + 2):
                return found.end()
            start += _STRETCH
        return len(text)

    def before(self, text: str, end: int) -> int:
        """Returns the last place that is not behind a position; 0 where there is none."""
        while end > 0:
            start = max(0, end - _STRETCH)
            if places := [found.end() for found in _PLACE.finditer(text, start, end + 2)]:
                return places[-1]
            end = start
        return 0


def cuts_of(description: Json, pieces: Iterable[str]) -> SafeCuts | None:
    """Returns the finder for a tokenizer, by its own description (`to_str`); None: no place is safe."""
    normalizer = list(flatten(description.get("normalizer"), "normalizers"))
    cutting = list(flatten(description.get("pre_tokenizer"), "pretokenizers"))
    if any(map(_reaches_across, description["added_tokens"])):
        return None
    is_local = all(step["type"] in _LOCAL_NORMALIZERS for step in normalizer)
    # Later steps see each word by itself.
    if is_local and cutting and _cuts_at_spaces(cutting[0]):
        return SafeCuts()
    return SafeCuts() if _merges_within_words(description["model"], normalizer, cutting, pieces) else None


def _reaches_across(token: Json) -> bool:
    """Returns whether an added token may have a part on both sides of a place, or depend on the other side."""
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
    """Returns whether a step always begins a word at a place, whatever stands on the other side of it."""
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
    """Divides a pattern at each bar that is in no parentheses."""
    parts, depth = [""], 0
    for character in pattern:
        depth += (character == "(") - (character == ")")
        if character == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return set(parts)


def _merges_within_words(model: Json, normalizer: list[Json], cutting: list[Json], pieces: Iterable[str]) -> bool:
    """Returns whether a text is one word, of which no merge has a letter and the space behind it: Gemma's way."""
    is_spelled = [(step["type"], step.get("pattern"), step.get("content")) for step in normalizer] == [
        ("Replace", {"String": " "}, "▁")
    ]
    # Once it is spelled so there is no space left to cut at.
    is_whole = all(step["type"] == "Split" and step["pattern"] == {"String": " "} for step in cutting)
    if not (is_spelled and is_whole and model.get("type") == "BPE") or model.get("ignore_merges"):
        return False
    if model.get("dropout") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    pieces = set(pieces)
    return "▁" in pieces and not any(map(_ACROSS.search, pieces))
