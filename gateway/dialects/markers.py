"""Finds markers in a text that comes in pieces, and what of its end may become one."""

from __future__ import annotations

import re
from functools import lru_cache


class Markers:
    """A set of texts. Where several begin at one place the longest is found."""

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
        """Finds the first marker; none while what comes, unless the text is `at_end`, may make it a longer one."""
        return self._certain(self._pattern.search(text, start), at_end=at_end) if self._pattern else None

    def match(self, text: str, start: int, *, at_end: bool = False) -> re.Match[str] | None:
        """Finds the marker that stands at a place; none while what comes may make it a longer one."""
        return self._certain(self._pattern.match(text, start), at_end=at_end) if self._pattern else None

    def _certain(self, found: re.Match[str] | None, *, at_end: bool) -> re.Match[str] | None:
        return None if found is None or (self.may_become(found.string, found.start()) and not at_end) else found

    def is_free(self, text: str) -> bool:
        """Returns whether a text has no character with which a marker begins, and does not end with white space.

        Without markers every text is free.
        """
        return self._free.fullmatch(text) is not None

    def may_become(self, text: str, start: int) -> bool:
        """Returns whether all of a text from a place on may become a marker, or a longer one."""
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
        """Returns the place up to which no marker begins, nor white space before one, whatever comes."""
        if self._pattern is None:
            return len(text)
        return start + len(text[start : len(text) - self.num_held(text, start)].rstrip())


@lru_cache(1024)
def markers_of(*texts: str) -> Markers:
    return Markers(texts)
