"""Predicts how long a step takes, from the worker's own timings. Knows nothing of sequences and blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

NUM_MEASURED = 8
"""Steps with prefills that must be seen before the model is believed."""

_FORGETTING = 0.98  # of its kind's older steps a step leaves so much: some fifty count
_MAX_SURPRISE = 3.0  # a step that takes longer than so many times what was expected counts as if it took that
_MAX_UNFITTED = 16  # steps that may be noted without a new fit
# Prior for coefficients that the observed steps do not determine: seconds of a step, of a prefilled token, of a decode.
_PRIOR = (1e-3, 1e-4, 1e-4)
_PRIOR_WEIGHTS = (1e-2, 1e2, 1e0)

_Vector = tuple[float, float, float]


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

    Steps with and without prefills fade each on their own, so that a long time of only one kind does not wash away what
    is known of the other. Coefficients are not negative.
    """

    _with_prefills: _Moments = field(default_factory=_Moments)
    _decodes: _Moments = field(default_factory=_Moments)
    _num_steps: int = 0
    _num_prefills: int = 0
    _fitted: _Vector = _PRIOR
    _num_unfitted: int = 0

    def note(self, num_prefill_tokens: int, num_decodes: int, seconds: float) -> None:
        """A step took so long. One that took far longer than expected, as the first of its shape may, counts less."""
        if self._num_steps >= NUM_MEASURED and self._is_surprising(num_prefill_tokens, num_decodes, seconds):
            seconds = min(seconds, _MAX_SURPRISE * self.predict(num_prefill_tokens, num_decodes))
        self._num_steps += 1
        self._num_prefills += num_prefill_tokens > 0
        moments = self._with_prefills if num_prefill_tokens else self._decodes
        moments.add(num_prefill_tokens, num_decodes, seconds)
        self._num_unfitted += 1

    def _is_surprising(self, num_prefill_tokens: int, num_decodes: int, seconds: float) -> bool:
        """Whether a step may have been too long, by what was fitted not long ago: to fit costs more than to note."""
        if self._num_unfitted >= _MAX_UNFITTED:
            self._fit()
        base, per_token, per_decode = self._fitted
        return seconds > _MAX_SURPRISE * (base + per_token * num_prefill_tokens + per_decode * num_decodes)

    @property
    def is_measured(self) -> bool:
        """Whether enough was seen to rely on it."""
        return self._num_prefills >= NUM_MEASURED

    @property
    def seconds_per_prefill_token(self) -> float:
        """The seconds of one more token of a prefill; a guess until it is measured."""
        return self._coefficients()[1] if self.is_measured else _PRIOR[1]

    def predict(self, num_prefill_tokens: int, num_decodes: int) -> float:
        """How long such a step takes, in seconds."""
        base, per_token, per_decode = self._coefficients()
        return base + per_token * num_prefill_tokens + per_decode * num_decodes

    def count_prefill_tokens(self, num_decodes: int, target_seconds: float) -> int:
        """How many tokens can be prefilled beside so many decodes in so long a step: at least 0."""
        left = target_seconds - self.predict(0, num_decodes)
        return max(int(left / self._coefficients()[1]), 0)

    def _coefficients(self) -> _Vector:
        if self._num_unfitted:
            self._fit()
        return self._fitted

    def _fit(self) -> None:
        self._fitted, self._num_unfitted = _fit(self._with_prefills + self._decodes), 0


def _fit(sums: _Moments) -> _Vector:
    """The best coefficients: the normal equations, with the prior as a few observations more."""
    base, per_token, per_decode = _PRIOR_WEIGHTS
    rows = [
        [sums.count + base, sums.prefill, sums.decode, sums.seconds + base * _PRIOR[0]],
        [sums.prefill, sums.prefill_prefill + per_token, sums.prefill_decode, 0.0],
        [sums.decode, sums.prefill_decode, sums.decode_decode + per_decode, 0.0],
    ]
    rows[1][3] = sums.prefill_seconds + per_token * _PRIOR[1]
    rows[2][3] = sums.decode_seconds + per_decode * _PRIOR[2]
    solution = _solve(rows)
    # A token is never free, or a step would have room for any number of them.
    return max(solution[0], 0.0), max(solution[1], 1e-9), max(solution[2], 0.0)


def _solve(rows: list[list[float]]) -> _Vector:
    """Gauss-Jordan elimination of three equations; they are positive definite, so no pivot is 0."""
    for pivot in range(3):
        head = rows[pivot]
        head[:] = [value / head[pivot] for value in head]
        for row in rows:
            if row is not head:
                factor = row[pivot]
                row[:] = [value - factor * by for value, by in zip(row, head, strict=True)]
    return rows[0][3], rows[1][3], rows[2][3]
