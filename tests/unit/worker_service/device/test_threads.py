from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.kit.kernels.tiny_models import tiny_model
from worker_service.cache_engine import BlockFormat, allocate_pool
from worker_service.models.loader import load_model
from worker_service.runner.dry_runs import fewest_good_threads, has_tried_enough, settle_threads
from worker_service.runner.model_runner import ModelRunner

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 1e-4}, 1),
        ({1: 1e-4, 2: 0.95e-4}, 1),
        ({1: 1e-4, 2: 0.6e-4}, 2),
        ({2: 1.5e-4, 1: 1e-4}, 1),
        ({1: 1e-4, 4: 0.5e-4, 8: 0.49e-4}, 4),
        ({1: 2e-3, 2: 1.9e-3}, 2),
        ({2: 2e-3, 1: 1.5e-3}, 2),
    ],
)
def test_a_small_step_gets_more_threads_only_where_they_gain(seconds: dict[int, float], chosen: int) -> None:
    assert fewest_good_threads(seconds) == chosen


@pytest.mark.parametrize(
    ("best", "num_trials", "elapsed_seconds", "enough"),
    [
        ({}, 0, 0.0, False),
        ({1: 5e-4, 2: 4e-4}, 6, 0.1, False),
        ({1: 5e-4, 2: 4e-4}, 7, 0.1, True),
        ({1: 15e-3, 2: 14e-3}, 1, 10.0, False),
        ({1: 15e-3, 2: 14e-3}, 2, 10.0, True),
        ({1: 40e-3, 2: 30e-3}, 1, 0.07, True),
        ({1: 15e-3, 2: 1.0}, 1, 0.07, False),
    ],
)
def test_trials_end_when_they_can_change_nothing(
    best: dict[int, float], num_trials: int, elapsed_seconds: float, enough: bool
) -> None:
    assert has_tried_enough(best, num_trials, elapsed_seconds) is enough


def test_the_chosen_count_is_in_force(two_threads: None) -> None:
    loaded = load_model(tiny_model("llama"), torch.float32, CPU, lambda done, total: None)
    pool = allocate_pool(BlockFormat.of(loaded.model, 16), 2, CPU)
    chosen = settle_threads(ModelRunner(loaded), pool, 16, 4)
    assert chosen in (1, 2)
    assert torch.get_num_threads() == chosen
