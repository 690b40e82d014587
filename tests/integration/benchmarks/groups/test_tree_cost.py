"""A short cut of benchmarks/groups/tree_cost.py: a model with leaves and without."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.groups import tree_cost
from benchmarks.kernels.phases import Workload
from benchmarks.kit import models

if TYPE_CHECKING:
    from pathlib import Path


def test_leaves_are_measured(tmp_path: Path) -> None:
    recipe = models.Recipe(64, 2, 4, 2, 1024, 320, tied=True, qkv_bias=False)
    folder = models.write_model(recipe, tmp_path / "model")
    found = tree_cost.measure(folder, "bfloat16", 1, {"decode": Workload(2, 1, 8)})
    assert found["decode"]["ratio"]["median"] > 0
