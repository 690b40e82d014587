"""Computes how long a worker may take for a step before it counts as hung. Learns from steps that were answered.

A worker that hangs says nothing, so only time tells it from a slow one. A false alarm costs a prefill of everything, a
late one costs the clients a pause: the limits are generous where little is known.
"""

from __future__ import annotations

from collections import deque

SHORTEST_SECONDS = 2.0
FACTOR = 20.0
# Steps of an epoch that may compile kernels, fault memory in or fill caches, and what they are given at least.
NUM_FIRST_STEPS = 4
FIRST_SECONDS = 10.0
# Where nothing was measured yet.
UNKNOWN_SECONDS = 60.0
SECONDS_PER_TOKEN = 0.05
_NUM_RECENT = 32


class StepDeadline:
    """Gives each step its limit in seconds; with `fixed_seconds` the same one to all."""

    def __init__(self, fixed_seconds: float = 0.0) -> None:
        self._fixed_seconds = fixed_seconds
        # Durations by the number of bits of a step's token count: such steps have similar sizes.
        self._recent: dict[int, deque[float]] = {}
        self._num_answered = 0

    @property
    def shortest_seconds(self) -> float:
        """No limit is shorter."""
        return self._fixed_seconds or SHORTEST_SECONDS

    def begin_epoch(self) -> None:
        """The worker may have just started."""
        self._num_answered = 0

    def find_seconds(self, num_tokens: int) -> float:
        """The limit of a step with so many tokens."""
        if self._fixed_seconds:
            return self._fixed_seconds
        limit = max(SHORTEST_SECONDS, FACTOR * self._estimate(num_tokens))
        return max(limit, FIRST_SECONDS) if self._num_answered < NUM_FIRST_STEPS else limit

    def _estimate(self, num_tokens: int) -> float:
        """The longest of the recent similar steps. If there are none: of the largest smaller ones, in proportion."""
        size = num_tokens.bit_length()
        known = max((bits for bits in self._recent if bits <= size), default=None)
        if known is None:
            return (UNKNOWN_SECONDS + SECONDS_PER_TOKEN * num_tokens) / FACTOR
        longest = max(self._recent[known])
        return longest if known == size else max(longest * 2 ** (size - known), SECONDS_PER_TOKEN * num_tokens / FACTOR)

    def on_answered(self, num_tokens: int, seconds: float) -> None:
        """Notes how long a step took."""
        self._num_answered += 1
        self._note(num_tokens, seconds)

    def on_missed(self, num_tokens: int) -> None:
        """Notes a step that was given up on. It may have been slow: what is like it gets twice as long next time."""
        self._note(num_tokens, 2 * self.find_seconds(num_tokens) / FACTOR)

    def _note(self, num_tokens: int, seconds: float) -> None:
        self._recent.setdefault(num_tokens.bit_length(), deque(maxlen=_NUM_RECENT)).append(seconds)
