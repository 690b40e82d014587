"""Layers with a window: with their old blocks and without them the bits are the same, in whatever order they come."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from tests.kernels.test_families import COMPLETE, load
from tests.kit.kernels.families import VOCAB_SIZE

if TYPE_CHECKING:
    from tests.kit.kernels.backends import Kernels
    from tests.kit.kernels.step_runner import StepRunner

LENGTH = 290  # two pieces of 256 keys
TOKEN_IDS = tuple(random.Random(5).choices(range(VOCAB_SIZE), k=LENGTH))
# Alternating windows, one layer of four without one, and nothing but windows.
NAMES = ("gemma3", "cohere2", "mistral")


def run(runner: StepRunner) -> torch.Tensor:
    """A prefill in pieces, then decodes across the border of a block and of the keys that are read together."""
    pieces = [40, 7, 100, 97, 30, *[1] * (LENGTH - 274)]
    return runner.run("subject", TOKEN_IDS, pieces)


def with_windows(runner: StepRunner, windows: tuple[int, ...]) -> StepRunner:
    """Gives back as if these were the windows of its groups."""
    runner._groups = replace(runner._groups, windows=windows)
    return runner


@pytest.mark.parametrize("kernels", COMPLETE, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_given_back_is_not_missed(name: str, kernels: Kernels) -> None:
    """What is given back is poisoned at once. The negative control: one block of 32 tokens too many is missed."""
    runner = load(name, kernels)
    windows = runner.model.kv_groups.windows
    assert 40 in windows
    given_back = run(runner)
    kept = run(with_windows(load(name, kernels), (0,) * len(windows)))
    assert torch.equal(given_back, kept)
    if not kernels.is_reference:
        assert torch.equal(run(load(name, kernels).capture(128)), kept)
    too_narrow = tuple(window and window - 32 for window in windows)
    missed = run(with_windows(load(name, kernels), too_narrow))
    assert not torch.equal(missed, kept)
