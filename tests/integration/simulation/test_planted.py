"""The simulation notices mistakes in the product."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kit.simulation.planted.mistakes import find_planted, plant, search

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kit.simulation.planted.mistakes import Planted

# Two that are found within a few seeds: one in the gateway, one in the core.
NAMES = ["sent_twice", "begun_in_flight"]
NUM_SEEDS = 50
SECONDS = 300.0


@pytest.mark.parametrize("planted", find_planted(NAMES), ids=lambda planted: planted.name)
def test_a_planted_mistake_is_found(planted: Planted, tmp_path: Path) -> None:
    plant(planted, tmp_path)
    assert search(planted, tmp_path, range(NUM_SEEDS), SECONDS).seed is not None
