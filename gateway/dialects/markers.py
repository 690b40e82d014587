"""Finds markers in a text that comes in pieces, and the end of the text that may become a marker."""

from __future__ import annotations

import re
from functools import lru_cache


class Markers:
    """A set of markers. If several begin at one place, the longest is found."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        by_length = sorted(set(texts), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, by_length))) if by_length else None
        self._prefixes = {text[:end] for text in texts for end in range(1, len(text))}
        self._longest = max(map(len, self._prefixes), default=0)
        firsts = {text[0] for text in self._prefixes}
        self._first = re.compile("|".join(map(re.escape, firsts))) if firsts else None
        begins = re.escape("".join({text[0] for text in texts}))
        self._free = re.compile(rf"[^{begins}]*[^{begins}\s]" if texts else ".*", re.DOTALL)

    def search(self, text: str, start: int = 0, *, at_end: bool = False) -> re.Match[str] | None:
        """Finds the first marker. Unless `at_end`, returns None while more text may turn it into a longer marker."""
        return self._certain(self._pattern.search(text, start), at_end=at_end) if self._pattern else None

    def match(self, text: str, start: int, *, at_end: bool = False) -> re.Match[str] | None:
        """Finds the marker at `start`. Unless `at_end`, returns None while more text may turn it into a longer one."""
        return self._certain(self._pattern.match(text, start), at_end=at_end) if self._pattern else None

    def _certain(self, found: re.Match[str] | None, *, at_end: bool) -> re.Match[str] | None:
        return None if found is None or (self.may_become(found.string, found.start()) and not at_end) else found

    def is_free(self, text: str) -> bool:
        """Returns whether a text contains no marker's first character, and does not end with white space.

        If the set is empty, every text is free.
        """
        return self._free.fullmatch(text) is not None

    def may_become(self, text: str, start: int) -> bool:
        """Returns whether the text from `start` to its end is the beginning of a longer marker."""
        return len(text) - start <= self._longest and text[start:] in self._prefixes

    def num_held(self, text: str, start: int = 0) -> int:
        """Returns how many characters at the end of a text may be the beginning of a marker."""
        place = max(start, len(text) - self._longest)
        while self._first is not None and (found := self._first.search(text, place)):
            place = found.start()
            if text[place:] in self._prefixes:
                return len(text) - place
            place += 1
        return 0

    def end_before(self, text: str, start: int) -> int:
        """Returns the index up to which the text surely contains neither a marker nor the white space before one."""
        if self._pattern is None:
            return len(text)
        return start + len(text[start : len(text) - self.num_held(text, start)].rstrip())


@lru_cache(1024)
def markers_of(*texts: str) -> Markers:
    return Markers(texts)
