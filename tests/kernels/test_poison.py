"""A weight that is not a number or infinite is told of by our kernels wherever the reference tells of it.

`python -m tests.kit.kernels.poison` goes through all of them; here a part is drawn, by a seed, for each kernels.
"""

from __future__ import annotations

import random
from functools import cache

import pytest

from tests.kit.kernels.backends import COMPILED, Kernels
from tests.kit.kernels.poison import CHUNKS, FAMILIES, VALUES, Poison, weights_of

NUM_DRAWN = 12


@cache
def draw(kernels: Kernels, quantization: str) -> list[Poison]:
    chooser = random.Random(str(kernels) + quantization)
    families = [chooser.choice(FAMILIES) for _ in range(NUM_DRAWN)]
    drawn = [(family, chooser.choice(weights_of(family)), chooser.choice(VALUES)) for family in families]
    # What was swallowed: all scores of a step's rows are no numbers.
    drawn += [
        ("llama_bias", f"model.layers.0.self_attn.{name}", VALUES[0]) for name in ("q_proj.bias", "k_proj.weight")
    ]
    return [Poison(*each, kernels, quantization) for each in drawn]


@pytest.mark.parametrize("kernels", COMPILED, ids=str)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_bad_weight_is_told_of_in_a_piece_of_any_length(kernels: Kernels, quantization: str):
    chooser = random.Random(3)
    for poison in draw(kernels, quantization):
        chunks = sorted({1, 3, 16, *chooser.sample(CHUNKS, 4)})
        assert poison.swallowed(chunks) == [], str(poison)


def test_what_is_poisoned_is_told_of_by_the_reference():
    """Otherwise the test compares nothing."""
    poison = Poison("qwen3", "model.layers.1.mlp.down_proj.weight", VALUES[0], COMPILED[0])
    assert poison.expected([1, 40]) == [False, False]
    assert Poison("qwen3", "no such weight", VALUES[0], COMPILED[0]).expected([1, 40]) == [True, True]
