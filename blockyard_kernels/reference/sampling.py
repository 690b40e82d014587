"""The sampling ops (`blockyard_kernels.sampling`) in torch: the filters and the draw of a row depend on that row only.

This module uses only reductions over the whole vocabulary or over a number of candidates that follows from the row's
parameters, and elementwise functions whose bits do not depend on the length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard_kernels.launching import put_last_tokens, take_last_tokens, upload
from blockyard_kernels.reference import logprobs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blockyard_kernels.sampling import Choices, Flags, Integers, TokenLogprobs

# Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

# Elements of noise that are made at a time: they fit into a core's L2 cache.
_NOISE_ELEMENTS = 1 << 18
# How many of a row's best tokens are tried before its whole vocabulary is sorted: see `numbers_of_candidates`.
CANDIDATE_COUNTS = (64, 1024)
# Logits that are processed at a time, since sorting a whole vocabulary takes SORTING_COPIES times their memory.
MAX_CHOSEN_LOGITS = 1 << 21
SORTING_COPIES = 12
# Memory that log probabilities of all tokens take, in copies of the logits.
LOGPROB_COPIES = 2
# Special numbers of candidates: GREEDY takes the likeliest token, UNFILTERED draws from the whole vocabulary.
GREEDY, UNFILTERED = -1, 0

Words = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class DrawKeys:
    """The inputs of a draw besides the logits: int64 columns [rows].

    `seeds` hold 64 bits each, `positions` the index among the output tokens from 0, `sequence_indexes` the index of the
    sequence within its request.
    """

    seeds: Tensor
    positions: Tensor
    sequence_indexes: Tensor

    def select(self, rows: Tensor) -> DrawKeys:
        """Picks rows by index (int64 [n])."""
        return DrawKeys(self.seeds[rows], self.positions[rows], self.sequence_indexes[rows])


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of drawn tokens: columns [rows]; `top_k` int64 with 0 for off, `top_p` and `min_p` float32."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def select(self, rows: Tensor) -> Filters:
        """Picks rows by index (int64 [n])."""
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox4x32-10 on int64 tensors that hold 32-bit words and broadcast against each other.

    A product wraps modulo 2**64, so both of its halves are right although int64 has a sign.
    """
    k0, k1 = key
    c0, c1, c2, c3, _ = torch.broadcast_tensors(*counter, k0)
    for _ in range(_ROUNDS):
        low0, low1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = low0 >> 32, low1 >> 32
        # In place: these tensors are as large as the noise, and a round is limited by memory bandwidth.
        c0, c1 = high1.bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_WORD), low1.bitwise_and_(_WORD)
        c2, c3 = high0.bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_WORD), low0.bitwise_and_(_WORD)
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _words(keys: DrawKeys, counters: Tensor) -> Words:
    """The four words of each counter (int64 [rows or 1, n], token id / 4), each [rows, n]."""
    seeds = keys.seeds[:, None]
    zero = torch.zeros((), dtype=torch.int64, device=counters.device)
    counter = (counters, keys.positions[:, None] & _WORD, keys.sequence_indexes[:, None] & _WORD, zero)
    return philox(counter, (seeds & _WORD, (seeds >> 32) & _WORD))


def _to_exponential(words: Tensor) -> Tensor:
    """Turns uniform words into Exp(1), float32: small values, which win the race, keep all their 24 bits."""
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def exponential_noise(keys: DrawKeys, token_ids: Tensor) -> Tensor:
    """Makes the noise of some tokens: `token_ids` int64 [rows, n] -> float32 [rows, n]."""
    words = _words(keys, token_ids >> 2)
    lane = token_ids & 3
    low, high = torch.where(lane == 0, words[0], words[1]), torch.where(lane == 2, words[2], words[3])
    return _to_exponential(torch.where(lane < 2, low, high))


def full_exponential_noise(keys: DrawKeys, vocab_size: int) -> Tensor:
    """Makes the noise of every token: float32 [rows, vocab_size]. Each counter gives four neighbours."""
    counters = torch.arange((vocab_size + 3) // 4, device=keys.seeds.device)[None]
    return _to_exponential(torch.stack(_words(keys, counters), 2).flatten(1)[:, :vocab_size])


def finite_rows(logits: Tensor) -> Tensor:
    """Returns which rows [rows, vocabulary] are finite: bool [rows]. One sum is enough, since it keeps NaN and inf."""
    return torch.isfinite(logits.sum(-1))


def argmax(logits: Tensor) -> Tensor:
    """Picks the largest of each row, the lowest id on ties: int64 [rows]."""
    return logits.argmax(-1)


def draw(logits: Tensor, temperatures: Tensor, keys: DrawKeys) -> Tensor:
    """Draws a token of each row from its whole vocabulary.

    Args:
        logits: float32 [rows, vocabulary]; -inf is impossible.
        temperatures: float32 [rows], > 0.
        keys: columns [rows].

    Returns:
        int64 [rows].
    """
    drawn: list[Tensor] = []
    for rows in _slabs(logits):
        noise = full_exponential_noise(keys.select(rows), logits.shape[1])
        scores = logits[rows] / temperatures[rows, None]
        drawn.append(argmax(scores.sub_(noise.log_())))
    return torch.cat(drawn)


def _slabs(table: Tensor) -> Iterable[Tensor]:
    """Yields row indexes (int64) of a table [rows, n], in pieces whose noise fits into the cache."""
    return torch.arange(len(table), device=table.device).split(max(1, _NOISE_ELEMENTS // table.shape[1]))


def draw_filtered(
    logits: Tensor, temperatures: Tensor, filters: Filters, keys: DrawKeys, num_candidates: int
) -> Tensor:
    """Draws a token of each row from the tokens that pass min_p, then top_k, then top_p.

    The best `num_candidates` tokens of a row are tried first. If they do not determine which tokens pass, the row's
    whole vocabulary is sorted. `num_candidates` must follow from the row's own parameters (`CANDIDATE_COUNTS`), never
    from the batch, since the rounding of sums depends on the number of candidates.

    Args:
        logits: float32 [rows, vocabulary]; -inf is impossible.
        temperatures: float32 [rows], > 0.
        filters: columns [rows]; a top_k above `num_candidates` sorts the whole vocabulary.
        keys: columns [rows].
        num_candidates: number of tokens to try; from the vocabulary's size on, all tokens are sorted at once.

    Returns:
        int64 [rows].
    """
    vocab_size = logits.shape[1]
    mass = _log_mass(logits, temperatures, filters)
    if num_candidates >= vocab_size:
        return _draw_sorted(logits, temperatures, filters, keys, mass)
    values, token_ids = logits.topk(num_candidates + 1, dim=-1)
    values = values / temperatures[:, None]
    boundary = values[:, -1:]
    values, token_ids = _order(values[:, :-1], token_ids[:, :-1])
    best = _best(values, filters)
    keep = _nucleus(values, best, filters, mass)
    # torch chooses arbitrarily which of the tokens that tie at the boundary are candidates. And if the last candidate
    # passes, tokens beyond it may pass too, or have a share of the mass.
    goes_on = keep[:, -1] | (best[:, -1] & mass.isnan())
    settled_by_k = (filters.top_k > 0) & (filters.top_k <= num_candidates)
    unsettled = (keep & (values == boundary)).any(-1) | (goes_on & ~settled_by_k)
    drawn = _race(values, token_ids, keep, keys, vocab_size)
    again = unsettled.nonzero()[:, 0]
    if again.numel():
        drawn[again] = _draw_sorted(
            logits[again], temperatures[again], filters.select(again), keys.select(again), mass[again]
        )
    return drawn


def _draw_sorted(logits: Tensor, temperatures: Tensor, filters: Filters, keys: DrawKeys, mass: Tensor) -> Tensor:
    values, token_ids = (logits / temperatures[:, None]).sort(dim=-1, descending=True, stable=True)
    keep = _nucleus(values, _best(values, filters), filters, mass)
    return _race(values, token_ids, keep, keys, logits.shape[1])


def _log_mass(logits: Tensor, temperatures: Tensor, filters: Filters) -> Tensor:
    """Returns log(mass of the row / mass of its best token) of rows that only top_p filters, else NaN: [rows] float32.

    The sum is always over the whole vocabulary, so that it rounds alike with candidates and with all tokens sorted.
    """
    mass = torch.full_like(temperatures, float("nan"))
    rows = ((filters.top_k == 0) & (filters.min_p <= 0) & (filters.top_p < 1)).nonzero()[:, 0]
    if rows.numel():
        mass[rows] = -logprobs.log_softmax(logits[rows] / temperatures[rows, None]).max(-1).values
    return mass


def _order(values: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Orders candidates by value descending, then token id ascending."""
    token_ids, order = token_ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, token_ids.gather(1, order)


def _best(values: Tensor, filters: Filters) -> Tensor:
    """Returns which ordered candidates [rows, n] pass min_p and top_k, always a prefix of the row: bool [rows, n]."""
    keep = (values > float("-inf")) & (values >= values[:, :1] + filters.min_p.log()[:, None])
    rank = torch.arange(values.shape[1], device=values.device)
    return keep & ((rank < filters.top_k[:, None]) | (filters.top_k == 0)[:, None])


def _nucleus(values: Tensor, best: Tensor, filters: Filters, log_mass: Tensor) -> Tensor:
    """Returns which `best` ordered candidates pass top_p; the first one always passes: bool [rows, n].

    top_p is a share of the mass of the `best` candidates, or of the mass in `log_mass` [rows] where that is not NaN.
    """
    weights = torch.where(best, (values - values[:, :1]).exp(), 0).double()
    before = weights.cumsum(-1) - weights
    total = torch.where(log_mass.isnan(), before[:, -1] + weights[:, -1], log_mass.exp().double())
    share = (filters.top_p.double() * total)[:, None]
    return best & ((before < share) | (filters.top_p >= 1)[:, None])


def _race(values: Tensor, token_ids: Tensor, keep: Tensor, keys: DrawKeys, vocab_size: int) -> Tensor:
    """Draws one of the kept tokens, with the noise that it has in a draw from the whole vocabulary: int64 [rows]."""
    width = int(keep.sum(-1).max())
    values, token_ids, keep = values[:, :width], token_ids[:, :width], keep[:, :width]
    drawn: list[Tensor] = []
    for rows in _slabs(token_ids):
        ids = token_ids[rows]
        if width * 4 > vocab_size:
            # One counter gives four neighbours their noise: the whole vocabulary costs no more than these ids.
            noise = full_exponential_noise(keys.select(rows), vocab_size).gather(1, ids)
        else:
            noise = exponential_noise(keys.select(rows), ids)
        scores = (values[rows] - noise.log_()).masked_fill_(~keep[rows], float("-inf"))
        drawn.append(ids.gather(1, scores.argmax(-1, keepdim=True))[:, 0])
    return torch.cat(drawn)


def numbers_of_candidates(choices: Choices, vocab_size: int) -> Integers:
    """Returns how many candidates `draw_filtered` tries first in each row [R], or GREEDY, or UNFILTERED.

    The number follows from the row's parameters only, so that the batch cannot change a draw.
    """
    few, many = CANDIDATE_COUNTS
    top_k = choices.top_k
    by_k = np.select([top_k == 0, top_k <= few, top_k <= many], [many, few, many], vocab_size)
    is_filtered = (top_k > 0) | (choices.top_p < 1) | (choices.min_p > 0)
    drawn = np.where(is_filtered, by_k, UNFILTERED)
    return np.where(choices.temperatures > 0, drawn, GREEDY)


def _parts(counts: Integers, most: int) -> Iterable[tuple[int, Integers]]:
    """Yields (count, row indexes) in pieces of at most `most` rows that all have the same count."""
    for count in np.unique(counts).tolist():
        picked = np.flatnonzero(counts == count)
        for start in range(0, len(picked), most):
            yield count, picked[start : start + most]


class ReferenceSampling:
    """See `blockyard_kernels.sampling.SamplingOps`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def finite_rows(self, logits: Tensor) -> Flags:
        return finite_rows(logits).cpu().numpy()

    def launch_finite_rows(self, logits: Tensor) -> Tensor:
        """Like `finite_rows`, but leaves the flags on the device."""
        return finite_rows(logits)

    def apply_masks(self, logits: Tensor, rows: Integers, words: npt.NDArray[np.uint32]) -> None:
        device = logits.device
        # torch cannot shift unsigned integers.
        bits = upload(words.view(np.int32), device)[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)
        is_masked = (bits & 1 == 0).flatten(1)[:, : logits.shape[1]]
        places = upload(rows, device)
        logits[places] = logits[places].masked_fill_(is_masked, float("-inf"))

    def choose(self, logits: Tensor, choices: Choices) -> Integers:
        return self.launch_choose(logits, choices).cpu().numpy()

    def launch_choose(self, logits: Tensor, choices: Choices) -> Tensor:
        """Chooses on the device, together for rows with the same number of candidates. Filters wait for the device."""
        hopeless = ~torch.isfinite(logits.max(-1).values)
        if bool(hopeless.any()):
            # Keeps NaN and infinity out of the filters' sums.
            logits = logits.masked_fill(hopeless[:, None], 0)
        counts = numbers_of_candidates(choices, logits.shape[1])
        token_ids = torch.empty(len(logits), dtype=torch.int64, device=self._device)
        for count, picked in _parts(counts, max(1, MAX_CHOSEN_LOGITS // logits.shape[1])):
            some = logits if len(picked) == len(logits) else logits[self._tensor(picked)]
            token_ids[self._tensor(picked)] = self._choose_alike(some, choices.take(picked), count)
        return token_ids.masked_fill_(hopeless, -1)

    def _choose_alike(self, logits: Tensor, choices: Choices, num_candidates: int) -> Tensor:
        if num_candidates == GREEDY:
            return argmax(logits)
        columns = (choices.seeds, choices.positions, choices.sequence_indexes)
        keys, temperatures = DrawKeys(*map(self._tensor, columns)), self._tensor(choices.temperatures)
        if num_candidates == UNFILTERED:
            return draw(logits, temperatures, keys)
        filters = Filters(*map(self._tensor, (choices.top_k, choices.top_p, choices.min_p)))
        return draw_filtered(logits, temperatures, filters, keys, num_candidates)

    take_last_tokens = staticmethod(take_last_tokens)
    put_last_tokens = staticmethod(put_last_tokens)

    def token_logprobs(
        self, logits: Tensor, rows: Integers, token_ids: Integers | None, num_best: int
    ) -> TokenLogprobs:
        """Computes log probabilities of tokens of some rows, and of the best of each."""
        all_in_order = len(rows) == len(logits) and bool((rows == np.arange(len(rows))).all())
        some = logits if all_in_order else logits[self._tensor(rows)]
        return logprobs.token_logprobs(some, None if token_ids is None else self._tensor(token_ids), num_best)

    def choose_bytes(self, num_rows: int, vocab_size: int) -> int:
        num_chosen = min(num_rows * vocab_size, max(MAX_CHOSEN_LOGITS, vocab_size))
        return SORTING_COPIES * num_chosen * torch.float32.itemsize

    def token_logprobs_bytes(self, num_rows: int, vocab_size: int) -> int:
        return LOGPROB_COPIES * num_rows * vocab_size * torch.float32.itemsize

    def _tensor(self, column: npt.NDArray[Any]) -> Tensor:
        return upload(column, self._device)
