"""What rows of logits may ask of a sampler, and what is right by definition, in float64."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np
import torch

from blockyard_kernels.reference.sampling import DrawKeys, exponential_noise
from blockyard_kernels.sampling import Choices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard_kernels.sampling import Integers


def random_logits(num_rows: int, vocab_size: int, *, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def choices(
    num_rows: int, temperature: float = 1.0, *, top_k: float = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 1
) -> Choices:
    """Rows that ask for the same, each with a key of its own."""
    random = np.random.default_rng(seed)
    return Choices(
        np.full(num_rows, temperature, np.float32),
        np.full(num_rows, top_k, np.int64),
        np.full(num_rows, top_p, np.float32),
        np.full(num_rows, min_p, np.float32),
        random.integers(-(1 << 63), (1 << 63) - 1, num_rows, np.int64),
        random.integers(0, 1 << 20, num_rows),
        random.integers(0, 1 << 20, num_rows),
    )


def join(*parts: Choices) -> Choices:
    return Choices(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Choices)))


def order_of(values: Sequence[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))


def passing(logits: torch.Tensor, asked: Choices, row: int) -> list[int]:
    """Which tokens of a row may be drawn, by definition, in float64 but for the values themselves."""
    values = (logits[row] / float(asked.temperatures[row])).tolist()
    top_k, top_p, min_p = int(asked.top_k[row]), float(asked.top_p[row]), float(asked.min_p[row])
    order = order_of(values)
    best = values[order[0]]
    least = best + (math.log(min_p) if min_p else -math.inf)
    order = [token_id for token_id in order if values[token_id] > -math.inf and values[token_id] >= least]
    order = order[: top_k or None]
    weights = [math.exp(values[token_id] - best) for token_id in order]
    before = np.cumsum([0.0, *weights[:-1]])
    return [t for t, mass in zip(order, before, strict=True) if top_p >= 1 or mass < top_p * sum(weights)]


def scores(logits: torch.Tensor, asked: Choices, row: int, token_ids: Sequence[int]) -> torch.Tensor:
    """The scores of a row's tokens in the race: float64, of the reference's noise."""
    columns = (asked.seeds, asked.positions, asked.sequence_indexes)
    keys = DrawKeys(*(torch.from_numpy(column[row : row + 1]) for column in columns))
    noise = exponential_noise(keys, torch.tensor([list(token_ids)]))[0]
    return logits[row, list(token_ids)].double() / float(asked.temperatures[row]) - noise.double().log()


def check_winners(drawn: Integers, logits: torch.Tensor, asked: Choices) -> None:
    """Each is the winner of the race among those that pass, but for what float32 cannot tell apart."""
    for row, token_id in enumerate(drawn.tolist()):
        kept = passing(logits, asked, row)
        race = scores(logits, asked, row, kept)
        assert token_id in kept, row
        lead = float(race.max() - race[kept.index(token_id)])
        assert lead <= 1e-6 * max(4, float(race.abs().max())), row
