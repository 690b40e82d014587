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

    def search(self, text: str, start: int = 0, *, at_end: bool = False) -> re.Match[str] | None:
        """Finds the first marker; none while what comes, unless the text is `at_end`, may make it a longer one."""
        found = self._pattern.search(text, start) if self._pattern else None
        if found and not at_end and found.end() == len(text) and found[0] in self._prefixes:
            return None
        return found

    def may_begin(self, text: str) -> bool:
        """Returns whether a text, and nothing less, may become a marker."""
        return not text or text in self._prefixes

    def num_held(self, text: str, start: int = 0) -> int:
        """Returns how many characters at the end of a text may be the beginning of a marker."""
        for length in range(min(self._longest, len(text) - start), 0, -1):
            if text[-length:] in self._prefixes:
                return length
        return 0


@lru_cache(1024)
def markers_of(*texts: str) -> Markers:
    """Returns the set of these texts."""
    return Markers(texts)
