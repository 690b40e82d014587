"""docs/guides/add-a-model.md, followed as far as it goes without new code: what it says that comes, comes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from blockyard.errors import BlockyardError
from blockyard.model_config import families
from tests.kit.kernels import tiny_models
from worker_service.models.loader import load_model

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "add-a-model.md").read_text(encoding="utf-8")
RECIPE, FAMILY, *_ = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


def complaint_of(folder: Path) -> str:
    with pytest.raises(BlockyardError) as caught:
        load_model(folder, None, torch.device("cpu"), lambda done_bytes, total_bytes: None)
    return caught.value.message


def test_what_it_says_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_models, "RECIPES", dict(tiny_models.RECIPES))
    exec(RECIPE, vars(tiny_models))
    (name,) = re.findall(r'RECIPES\["(\w+)"\]', RECIPE)
    folder = tiny_models.make_tiny_model(name, tmp_path / name)
    (refused,) = re.findall(r"`(architecture '\w+' is not supported)`", GUIDE)
    assert complaint_of(folder).startswith(refused)

    (architecture,) = re.findall(r'FAMILIES\["(\w+)"\]', FAMILY)
    monkeypatch.setitem(families.FAMILIES, architecture, families.Family())
    exec(FAMILY, vars(families))
    (missing,) = re.findall(r"`(has no tensor \S+)`", GUIDE)
    assert missing in complaint_of(folder)
