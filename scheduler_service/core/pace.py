"""What a draft costs: the time of one more row in a step of decodes, in tokens that this time would bring otherwise.

The worker knows how likely a draft is right, and takes those that are worth their price. It may not use a clock, since
all ranks of a group must draft the same. So its times come here, and prices go back with each step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise

NUM_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of rows for which the time of a step is kept, if the worker measured none at warm-up."""
NUM_STEPS = 64
"""Steps after which prices may change."""

MAX_PERIOD = 8
"""In at least one of so many steps the worker may look for drafts, however long it has found none."""
_STEPS_OF_PERIOD = 16  # steps without a draft after which it looks in one step fewer

_RATE = 0.05  # weight of a new step
_LEAST_CHANGE = 0.05  # smaller changes of times change no price, so that the bytes of steps stay the same
_MAX_SURPRISE = 3.0  # a step counts as at most this many times, and at least this part of, the expected time
# A noisy machine may not make prices that its warm-up contradicts.
_LEAST_SHARE, _LARGEST_SHARE = 0.7, 1.5
_BEST_CHANCE = 0.95  # a draft that is seldom right when the worker is surest
_RETURN = 0.1  # how fast the time of a number of rows that no step has follows that of the others


class Pace:
    """The seconds of a step of decodes by its number of rows, and the rows and tokens that a sequence has in a step.

    Pure and deterministic. Until `seed` or `note` is called, all numbers of rows cost the same. `period`: in one of so
    many steps the worker may draft.
    """

    __slots__ = (
        "_counts",
        "_is_seeded",
        "_max_draft_rows",
        "_num_idle",
        "_num_noted",
        "_num_rows",
        "_prices",
        "_rows_per_sequence",
        "_seeds",
        "_shares",
        "_tokens_per_sequence",
        "_used",
        "period",
    )

    def __init__(self, max_draft_rows: int = 0) -> None:
        self._max_draft_rows = max_draft_rows
        self._is_seeded = False
        self._num_idle = 0
        self.period = 1
        self._seed(NUM_ROWS, [1.0] * len(NUM_ROWS))

    def _seed(self, num_rows: tuple[int, ...], seconds: list[float]) -> None:
        self._num_rows = num_rows
        self._seeds = seconds
        self._shares = [1.0] * len(seconds)  # of the present times in the seeds
        self._counts = [0.0] * len(seconds)  # steps near each number of rows since the prices were looked at
        self._rows_per_sequence = self._tokens_per_sequence = 1.0
        self._num_noted = 0
        self._use()

    def seed(self, num_rows: tuple[int, ...], seconds: tuple[float, ...]) -> None:
        """Begins with the times that a worker measured; without any they are learned."""
        self._is_seeded = bool(num_rows)
        self._seed(num_rows or NUM_ROWS, list(seconds) or [1.0] * len(NUM_ROWS))

    def note(self, num_rows: int, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """Notes a step of decodes alone: its rows, drafts among them, and the tokens that its sequences got."""
        if not (self._is_seeded or self._num_noted):
            self._seeds = [seconds] * len(self._seeds)
        self._num_noted += 1
        self._rows_per_sequence += _RATE * (num_rows / num_sequences - self._rows_per_sequence)
        self._tokens_per_sequence += _RATE * (max(num_tokens / num_sequences, 1.0) - self._tokens_per_sequence)
        expected = interpolate(self._num_rows, self._times(), num_rows)
        surprise = min(max(seconds / expected, 1 / _MAX_SURPRISE), _MAX_SURPRISE) - 1
        for place, weight in self._find_near(num_rows):
            self._shares[place] = self._limit(self._shares[place] * (1 + _RATE * weight * surprise))
            self._counts[place] += weight
        if self._num_noted % NUM_STEPS == 0:
            self._look()

    def note_drafts(self, num_drafted: int) -> None:
        """Notes how many tokens were drafted in a step that might draft.

        Looking for drafts takes time, too: where none is found for long, it is done seldom until the next one is found.
        """
        self._num_idle = 0 if num_drafted else self._num_idle + 1
        self.period = min(1 + self._num_idle // _STEPS_OF_PERIOD, MAX_PERIOD)

    def _times(self) -> list[float]:
        return [seed * share for seed, share in zip(self._seeds, self._shares, strict=True)]

    def _find_near(self, num_rows: int) -> list[tuple[int, float]]:
        """Finds the one or two known numbers of rows that are nearest, each with its part of the weight."""
        known, last = self._num_rows, len(self._num_rows) - 1
        place = max(bisect_right(known, num_rows) - 1, 0)
        if place == last or num_rows <= known[place]:
            return [(place, 1.0)]
        share = (num_rows - known[place]) / (known[place + 1] - known[place])
        return [(place, 1 - share), (place + 1, share)]

    def _limit(self, share: float) -> float:
        return min(max(share, _LEAST_SHARE), _LARGEST_SHARE) if self._is_seeded else share

    def _look(self) -> None:
        """Takes the learned times into use if they differ enough from those in use."""
        noted = sum(self._counts)
        mean = sum(count * share for count, share in zip(self._counts, self._shares, strict=True)) / noted
        self._shares = [
            share if count else share + _RETURN * (mean - share)
            for count, share in zip(self._counts, self._shares, strict=True)
        ]
        self._counts = [0.0] * len(self._counts)
        now = self._present()
        if any(abs(one - other) > _LEAST_CHANGE * other for one, other in zip(now, self._used, strict=True)):
            self._use()

    def _use(self) -> None:
        self._used = self._present()
        self._prices: dict[int, tuple[int, ...]] = {}

    def _present(self) -> list[float]:
        return [*self._times(), self._rows_per_sequence, self._tokens_per_sequence]

    def find_prices(self, num_sequences: int) -> tuple[int, ...]:
        """Returns the prices of a step's drafts, in thousandths of a token, as far as any of them can pay."""
        prices = self._prices.get(num_sequences)
        if prices is None:
            prices = self._prices[num_sequences] = self._compute_prices(num_sequences) if num_sequences else ()
        return prices

    def _compute_prices(self, num_sequences: int) -> tuple[int, ...]:
        *times, rows_per_sequence, tokens_per_sequence = self._used
        # A step with more rows never takes less time.
        rising = list(accumulate(times, max))
        seconds = [
            interpolate(self._num_rows, rising, num_sequences + count) for count in range(self._max_draft_rows + 1)
        ]
        # What a second brings: the tokens of late, by the time of the rows that brought them, drafts among these.
        late = interpolate(self._num_rows, rising, max(rows_per_sequence, 1.0) * num_sequences)
        per_second = tokens_per_sequence * num_sequences / late
        prices = [per_second * (more - less) for less, more in pairwise(seconds)]
        gain = best = 0.0
        num_best = 0
        for count, price in enumerate(prices, start=1):
            gain += _BEST_CHANCE - price
            if gain > best:
                best, num_best = gain, count
        return tuple(round(1000 * price) for price in prices[:num_best])


def interpolate(num_rows: tuple[int, ...], seconds: list[float], wanted: float) -> float:
    """Returns the time for `wanted` rows, on the line through the nearest known times; `num_rows` grow."""
    if wanted <= num_rows[0] or len(num_rows) == 1:
        return seconds[0]
    place = min(bisect_left(num_rows, wanted), len(num_rows) - 1)
    low, high = num_rows[place - 1], num_rows[place]
    share = (wanted - low) / (high - low)
    return max((1 - share) * seconds[place - 1] + share * seconds[place], min(seconds))
