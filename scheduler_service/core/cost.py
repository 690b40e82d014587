"""Estimates how long a step takes, and what it costs to recompute or to swap a sequence's KV, from workers' timings.

Knows nothing of sequences and pools.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

NUM_MEASURED = 8
"""Steps with prefills that must be measured before the model is used."""

_FORGETTING = 0.98  # weight that older steps of a kind keep with each new one: about fifty count
_MAX_SURPRISE = 3.0  # a step counts as at most this many times the expected time
_MAX_UNFITTED = 16  # steps between two fits
# Prior for coefficients that the observed steps do not determine: seconds of a step, of a prefilled token, of a decode.
_PRIOR = (1e-3, 1e-4, 1e-4)
_PRIOR_WEIGHTS = (1e-2, 1e2, 1e0)

_Vector = tuple[float, float, float]

_SWAP_FORGETTING = 0.9  # weight that older steps with swaps keep with each new one
# Blocks that can be moved in the time that computing one takes, until that is measured. A PCIe link moves the KV of a
# token in a hundredth of the time of its forward pass, host memory on a CPU in less.
_GUESSED_ADVANTAGE = 20.0
# The measured time of swaps is forgotten after this many times the seconds that they took, but not before
# _MIN_AGE_SECONDS, and guessed again. If it says that swaps do not pay, none are made, so it is never corrected. If it
# is right, finding that out again costs a hundredth of the time.
_MAX_AGE = 100.0
_MIN_AGE_SECONDS = 10.0


class StepWork(NamedTuple):
    """What a step did: tokens of prefills, decodes, and blocks moved between device and host.

    `takes_memory`: some host blocks were written for the first time.
    """

    num_prefill_tokens: int
    num_decodes: int
    num_swapped_blocks: int
    takes_memory: bool = False


@dataclass(slots=True)
class _Moments:
    """Sums over steps of one kind, older ones faded: products of (1, prefill tokens, decodes), and with the time."""

    prefill: float = 0.0
    decode: float = 0.0
    prefill_prefill: float = 0.0
    prefill_decode: float = 0.0
    decode_decode: float = 0.0
    count: float = 0.0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def add(self, prefill: int, decode: int, seconds: float) -> None:
        keep = _FORGETTING
        self.count = keep * self.count + 1
        self.prefill = keep * self.prefill + prefill
        self.decode = keep * self.decode + decode
        self.prefill_prefill = keep * self.prefill_prefill + prefill * prefill
        self.prefill_decode = keep * self.prefill_decode + prefill * decode
        self.decode_decode = keep * self.decode_decode + decode * decode
        self.seconds = keep * self.seconds + seconds
        self.prefill_seconds = keep * self.prefill_seconds + prefill * seconds
        self.decode_seconds = keep * self.decode_seconds + decode * seconds

    def __add__(self, other: _Moments) -> _Moments:
        return _Moments(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


@dataclass(slots=True)
class StepTimeModel:
    """seconds(step) = base + per_token x prefilled tokens + per_decode x decodes: weighted least squares.

    Steps with and without prefills fade separately, so that a long time of one kind does not wash out what is known of
    the other. Coefficients are not negative.
    """

    _with_prefills: _Moments = field(default_factory=_Moments)
    _decodes: _Moments = field(default_factory=_Moments)
    _num_steps: int = 0
    _num_prefills: int = 0
    _fitted: _Vector = _PRIOR
    _num_unfitted: int = 0

    def note(self, num_prefill_tokens: int, num_decodes: int, seconds: float) -> None:
        """Notes the time of a step. One far longer than expected, as the first of its shape may be, counts less."""
        if self._num_steps >= NUM_MEASURED and self._is_surprising(num_prefill_tokens, num_decodes, seconds):
            seconds = min(seconds, _MAX_SURPRISE * self.predict(num_prefill_tokens, num_decodes))
        self._num_steps += 1
        self._num_prefills += num_prefill_tokens > 0
        moments = self._with_prefills if num_prefill_tokens else self._decodes
        moments.add(num_prefill_tokens, num_decodes, seconds)
        self._num_unfitted += 1

    def _is_surprising(self, num_prefill_tokens: int, num_decodes: int, seconds: float) -> bool:
        """Whether a step may have taken too long, by a recent fit: a new fit costs more than a note."""
        if self._num_unfitted >= _MAX_UNFITTED:
            self._fit()
        base, per_token, per_decode = self._fitted
        return seconds > _MAX_SURPRISE * (base + per_token * num_prefill_tokens + per_decode * num_decodes)

    @property
    def is_measured(self) -> bool:
        """Whether enough steps were measured to use the model."""
        return self._num_prefills >= NUM_MEASURED

    @property
    def seconds_per_prefill_token(self) -> float:
        """Seconds of one more prefill token; a guess until it is measured."""
        return self._coefficients()[1] if self.is_measured else _PRIOR[1]

    def predict(self, num_prefill_tokens: int, num_decodes: int) -> float:
        base, per_token, per_decode = self._coefficients()
        return base + per_token * num_prefill_tokens + per_decode * num_decodes

    def count_prefill_tokens(self, num_decodes: int, target_seconds: float) -> int:
        """Returns how many tokens a step of `target_seconds` can prefill beside `num_decodes` decodes; 0 or more."""
        left = target_seconds - self.predict(0, num_decodes)
        return max(int(left / self._coefficients()[1]), 0)

    def _coefficients(self) -> _Vector:
        if self._num_unfitted:
            self._fit()
        return self._fitted

    def _fit(self) -> None:
        self._fitted, self._num_unfitted = _fit(self._with_prefills + self._decodes), 0


def _fit(sums: _Moments) -> _Vector:
    """Solves the normal equations, with the prior as a few more observations."""
    base, per_token, per_decode = _PRIOR_WEIGHTS
    rows = [
        [sums.count + base, sums.prefill, sums.decode, sums.seconds + base * _PRIOR[0]],
        [sums.prefill, sums.prefill_prefill + per_token, sums.prefill_decode, 0.0],
        [sums.decode, sums.prefill_decode, sums.decode_decode + per_decode, 0.0],
    ]
    rows[1][3] = sums.prefill_seconds + per_token * _PRIOR[1]
    rows[2][3] = sums.decode_seconds + per_decode * _PRIOR[2]
    solution = _solve(rows)
    # A token must cost something, or a step would have room for any number of them.
    return max(solution[0], 0.0), max(solution[1], 1e-9), max(solution[2], 0.0)


def _solve(rows: list[list[float]]) -> _Vector:
    """Gauss-Jordan elimination of three equations. They are positive definite, so no pivot is 0."""
    for pivot in range(3):
        head = rows[pivot]
        head[:] = [value / head[pivot] for value in head]
        for row in rows:
            if row is not head:
                factor = row[pivot]
                row[:] = [value - factor * by for value, by in zip(row, head, strict=True)]
    return rows[0][3], rows[1][3], rows[2][3]


@dataclass(slots=True)
class CostModel:
    """Seconds of recomputing and of swapping, by the worker's own timings; guessed until there are any."""

    block_size: int
    num_kv_groups: int = 1
    num_state_blocks: int = 0
    step_time: StepTimeModel = field(default_factory=StepTimeModel)
    _swap_seconds: float = 0.0
    _num_swapped: float = 0.0
    _now: float = 0.0
    _forget_at: float = 0.0

    def pass_time(self, now: float) -> None:
        """Forgets the measured time of swaps once it is too old. `now`: seconds of any steady clock."""
        self._now = now
        if self._num_swapped and now >= self._forget_at:
            self._swap_seconds = self._num_swapped = 0.0

    def note_step(
        self, work: StepWork, forward_seconds: float, cache_seconds: float, num_draft_tokens: int = 0
    ) -> None:
        """Notes the seconds that a step took to compute and to move blocks; 0: the worker did not say.

        `num_draft_tokens`: rows that it computed besides, since it drafted.
        Memory that is written for the first time must be taken from the system, which is slow once: such a step is not
        counted for swaps.
        """
        if forward_seconds > 0 and (work.num_prefill_tokens or work.num_decodes):
            self.step_time.note(work.num_prefill_tokens, work.num_decodes + num_draft_tokens, forward_seconds)
        if cache_seconds > 0 and work.num_swapped_blocks and not work.takes_memory:
            self._swap_seconds = _SWAP_FORGETTING * self._swap_seconds + cache_seconds
            self._num_swapped = _SWAP_FORGETTING * self._num_swapped + work.num_swapped_blocks
            self._forget_at = self._now + max(_MAX_AGE * self._swap_seconds, _MIN_AGE_SECONDS)

    def recompute_seconds(self, num_tokens: int) -> float:
        return num_tokens * self.step_time.seconds_per_prefill_token

    def swap_seconds(self, num_blocks: int) -> float:
        """Estimates the seconds to move blocks once, in one direction."""
        if self._num_swapped:
            return num_blocks * self._swap_seconds / self._num_swapped
        num_groups = max(self.num_kv_groups, 1)
        return self.recompute_seconds(num_blocks * self.block_size) / num_groups / _GUESSED_ADVANTAGE

    def preempt_seconds(self, num_tokens: int) -> float:
        """Estimates the seconds to preempt a victim and bring it back: by swaps or by recomputing, the cheaper."""
        return min(self._swap_both_ways(num_tokens), self.recompute_seconds(num_tokens))

    def prefers_swap(self, num_tokens: int) -> bool:
        """Whether a victim with so many tokens is cheaper to swap out and in than to compute again."""
        return self._swap_both_ways(num_tokens) < self.recompute_seconds(num_tokens)

    def prefers_host_block(self) -> bool:
        """Whether a block that the host has is cheaper to bring back than to compute."""
        return self.swap_seconds(self.num_kv_groups) < self.recompute_seconds(self.block_size)

    def _swap_both_ways(self, num_tokens: int) -> float:
        num_blocks = -(-num_tokens // self.block_size) * self.num_kv_groups
        return 2 * self.swap_seconds(num_blocks + self.num_state_blocks)
