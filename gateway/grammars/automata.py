"""Estimates how many states the automata of regular expressions and of multiples have. Compiles nothing.

For example, the automaton of a(bc){2,5} has about 11 states.
"""

from __future__ import annotations

import re
from decimal import Decimal

_LARGEST = 10**9
# The states assumed for the automaton of any JSON Schema `format`: date-time, addresses and UUIDs, the largest, have
# about as many.
FORMAT_SIZE = 40
_PIECE = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<open>\((?:\?(?:P?<\w*>|[A-Za-z-]*:)?)?)|(?P<close>\))"
    r"|\{(?P<least>\d+)(?:(?P<comma>,)(?P<most>\d*))?\}|(?P<mark>[*+?|^$])|.",
    re.DOTALL,
)


def pattern_size(pattern: str) -> int:
    """Returns the length of a regular expression whose counted repetitions are written out."""
    # For each open group: its size so far, and the size of its last piece.
    groups = [[0, 0]]
    for found in _PIECE.finditer(pattern):
        group = groups[-1]
        if found["open"]:
            groups.append([0, 0])
        elif found["close"]:
            if len(groups) > 1:
                size = groups.pop()[0]
                groups[-1] = [groups[-1][0] + size, size]
        elif found["least"]:
            times = max(int(number[:9]) for number in (found["least"], found["most"] or "1"))
            group[0] = min(_LARGEST, group[0] + group[1] * max(0, times - 1))
            group[1] *= times
        elif not found["mark"]:
            group[:] = [group[0] + 1, 1]
    return max(1, min(_LARGEST, sum(group[0] for group in groups)))


def multiple_size(value: float) -> int:
    """Returns the number of remainders that an automaton needs to recognize decimal multiples of a number."""
    number = abs(Decimal(repr(value)))
    if not number.is_finite() or not number or number.adjusted() > 18:
        return _LARGEST
    digits = int(number.scaleb(-int(number.as_tuple().exponent)))
    factors = 0
    for prime in (2, 5):
        while digits % prime == 0:
            digits //= prime
            factors += 1
    return min(_LARGEST, digits + factors)
