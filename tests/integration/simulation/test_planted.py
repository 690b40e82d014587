"""The simulation notices mistakes in the product."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import pytest

from tests.kit.simulation.planted.mistakes import find_planted, plant, search

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kit.simulation.planted.mistakes import Planted

# One that is found within a few seeds.
NAMES = ["record_without_last"]
NUM_SEEDS = 20


@pytest.mark.parametrize("planted", find_planted(NAMES), ids=lambda planted: planted.name)
def test_a_planted_mistake_is_found(planted: Planted, tmp_path: Path) -> None:
    plant(planted, tmp_path)
    assert search(planted, tmp_path, range(NUM_SEEDS), inf).seed is not None
