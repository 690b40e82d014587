"""Rotary position embeddings: the kinds of `blockyard.model_config.rotary`, and their table of cosines and sines.

The table is made once, in float32 and rounded to the dtype: models were trained with angles of that precision, and
exact ones would differ from theirs more with every position (4e-5 at position 700). Frequencies never depend on the
length of the running sequence, since a token's keys would then depend on later tokens: "dynamic" is refused, and of the
two tables of "longrope" one is chosen by the longest sequence that is served.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from blockyard.model_config.rotary import RotaryConfig

PART = 4096


def rotary_table(config: RotaryConfig, head_dim: int, num_positions: int, dtype: torch.dtype) -> Tensor:
    """Makes the table [num_positions, 2 * R]: cosines, then sines of which the first half is negated.

    R is the number of rotated numbers of a head. If queries have a scale that grows with the position, the table is
    [num_positions, 4 * R]; its second half is for queries.
    """
    size = config.rotated(head_dim)
    frequencies, attention_factor = KINDS[config.kind](config, size)
    table = torch.empty(num_positions, config.num_angles(head_dim), dtype=dtype)
    # Part by part: a long context's table in float32, several times over, would be larger than a small model.
    for start, part in zip(range(0, num_positions, PART), table.split(PART), strict=True):
        positions = torch.arange(start, start + len(part), dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        cosines, sines = angles.cos() * attention_factor, angles.sin() * attention_factor
        turns = torch.cat([cosines, cosines, -sines, sines], dim=1)
        part[:, : 2 * size].copy_(turns)
        if config.query_growth:
            growth = 1 + config.query_growth * torch.log(1 + torch.floor(positions / config.original_length))
            part[:, 2 * size :].copy_(turns * growth[:, None])
    return table


def _default(config: RotaryConfig, size: int) -> tuple[Tensor, float]:
    """RoFormer (arXiv 2104.09864), in the layout that pairs dimension i with i + size / 2."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    return 1.0 / config.theta**exponents, 1.0


def _linear(config: RotaryConfig, size: int) -> tuple[Tensor, float]:
    """Position interpolation (arXiv 2306.15595)."""
    frequencies, _ = _default(config, size)
    return frequencies / config.parameters["factor"], 1.0


def _llama3(config: RotaryConfig, size: int) -> tuple[Tensor, float]:
    """Llama 3.1: long wavelengths are stretched, short ones kept, and those in between blended."""
    given = config.parameters
    frequencies, _ = _default(config, size)
    turns = given["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = (turns - given["low_freq_factor"]) / (given["high_freq_factor"] - given["low_freq_factor"])
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / given["factor"]), 1.0


def _yarn(config: RotaryConfig, size: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): blends interpolated and original frequencies by a ramp over the dimensions."""
    given = config.parameters
    frequencies, _ = _default(config, size)
    low = _turning_dimension(config, size, given.get("beta_fast") or 32)
    high = _turning_dimension(config, size, given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    # With few positions the two ends swap and the divisor becomes negative: we divide as transformers does.
    width = high - low or 0.001
    ramp = (torch.arange(size // 2, dtype=torch.float32) - low) / width
    stretched = ramp.clamp(0, 1)
    return frequencies * (1 - stretched + stretched / given["factor"]), _yarn_attention_factor(given)


def _turning_dimension(config: RotaryConfig, size: int, num_turns: float) -> float:
    """Returns the dimension whose angle makes the given number of turns over the original length."""
    length = config.parameters["original_max_position_embeddings"]
    return size * math.log(length / (num_turns * 2 * math.pi)) / (2 * math.log(config.theta))


def _yarn_attention_factor(given: dict[str, float]) -> float:
    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(given["factor"]) + 1 if given["factor"] > 1 else 1.0

    if "attention_factor" in given:
        return given["attention_factor"]
    if given.get("mscale") and given.get("mscale_all_dim"):
        return growth(given["mscale"]) / growth(given["mscale_all_dim"])
    return growth(1)


def _longrope(config: RotaryConfig, size: int) -> tuple[Tensor, float]:
    """LongRoPE (arXiv 2402.13753): each frequency has a factor of its own."""
    given, exponents = config.parameters, torch.arange(0, size, 2, dtype=torch.float32) / size
    frequencies = 1.0 / (torch.tensor(config.long_factors) * config.theta**exponents)
    if "attention_factor" in given:
        return frequencies, given["attention_factor"]
    growth = math.log(given["factor"]) / math.log(config.original_length) if given["factor"] > 1 else 0.0
    return frequencies, math.sqrt(1 + growth)


def _ntk_alpha(config: RotaryConfig, size: int) -> tuple[Tensor, float]:
    """Hunyuan: a larger base for every length."""
    theta = config.theta * config.parameters["alpha"] ** (size / (size - 2))
    return 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size), 1.0


KINDS: dict[str, Callable[[RotaryConfig, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "ntk_alpha": _ntk_alpha,
}
