"""Finds the stop string that completes first in a streamed text. Knows no tokens.

One automaton matches all stop strings (Aho and Corasick, "Efficient string matching", 1975). A character costs one
lookup, whatever the number of stop strings and the splitting of the text. The automaton's state is the longest end of
the text that begins a stop string: exactly the text that must be held back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple


@dataclass(slots=True)
class _Node:
    depth: int
    children: dict[str, _Node] = field(default_factory=dict[str, "_Node"])
    fallback: _Node | None = None
    # The longest stop string that ends here.
    match: str | None = None


# Automata are cached for later requests. An automaton takes about 270 bytes for each character of its stop strings.
_MAX_SMALL_CHARACTERS = 256
_MAX_SMALL, _MAX_LARGE = 1024, 8


def _automaton(stop_strings: tuple[str, ...]) -> _Node:
    """Returns the automaton of stop strings; the sequences of one request share it, however large it is."""
    is_small = sum(map(len, stop_strings)) <= _MAX_SMALL_CHARACTERS
    return (_make_small if is_small else _make_large)(stop_strings)


def _make_automaton(stop_strings: tuple[str, ...]) -> _Node:
    root = _Node(0)
    for stop_string in stop_strings:
        node = root
        for character in stop_string:
            node = node.children.setdefault(character, _Node(node.depth + 1))
        node.match = stop_string
    queue = deque([root])
    while queue:
        node = queue.popleft()
        for character, child in node.children.items():
            child.fallback = _step(root, node.fallback, character) if node.fallback else root
            child.match = child.match or child.fallback.match
            queue.append(child)
    return root


_make_small = lru_cache(_MAX_SMALL)(_make_automaton)
_make_large = lru_cache(_MAX_LARGE)(_make_automaton)


def _step(root: _Node, node: _Node, character: str) -> _Node:
    while character not in node.children:
        if node.fallback is None:
            return root
        node = node.fallback
    return node.children[character]


class Match(NamedTuple):
    """A completed stop string. `text`: the text before it to release, with the stop string if it is included."""

    stop_string: str
    text: str


class StopStringMatcher:
    """Holds back text that may belong to a stop string, and finds the stop string that completes first.

    If several complete at the same character, the longest counts.
    """

    def __init__(self, stop_strings: tuple[str, ...], *, include_in_output: bool = False) -> None:
        self._root = self._node = _automaton(stop_strings)
        self._include_in_output = include_in_output
        self._held = ""

    def push(self, text: str, *, may_match: bool = True) -> str | Match:
        """Adds text, and returns the text to release or the match. After a match, `push` must not be called.

        `may_match`: whether stop strings that complete within this text count; false below min_tokens.
        """
        root, node, held = self._root, self._node, self._held + text
        num_held = len(self._held)
        for position, character in enumerate(text, num_held + 1):
            node = node.children.get(character) or (_step(root, node, character) if node is not root else root)
            if node.match is not None and may_match:
                return self._matched(node.match, held[:position])
        self._node = node
        release = len(held) - node.depth
        self._held = held[release:]
        return held[:release]

    def _matched(self, stop_string: str, text: str) -> Match:
        self._held = ""
        return Match(stop_string, text if self._include_in_output else text[: -len(stop_string)])

    def flush(self) -> str:
        """Returns the held-back text at the end of a sequence without a match."""
        held, self._held, self._node = self._held, "", self._root
        return held
