"""A short cut of benchmarks/groups/rank_speed.py: three ways to use two processors, with a tiny model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.groups import rank_speed
from benchmarks.kit import models

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.timeout(120)
async def test_each_way_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two systems have to start, not three.
    monkeypatch.delitem(rank_speed.WAYS, "PP 2")
    recipe = models.Recipe(64, 2, 4, 2, 96, 320, tied=True, qkv_bias=False)
    result = await rank_speed.measure(models.write_model(recipe, tmp_path / "model"), "float32", [1], num_rounds=1)
    assert result["speed"][0]["ratio"].keys() == {"TP 2"}
    shares = result["weights_bytes"]
    assert [len(shares[way]) for way in rank_speed.WAYS] == [1, 2]
    assert max(shares["TP 2"]) < 0.6 * shares["1 worker"][0]
