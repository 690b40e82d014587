"""docs/guides/add-a-model.md, followed as far as it goes without new code: what it says that comes, comes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers

from blockyard.errors import BlockyardError
from blockyard.model_config import network as table
from blockyard.model_config.families import relatives
from tests.kit.kernels import families
from tests.kit.kernels.step_runner import StepRunner
from worker_service.models.loader import load_model

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "add-a-model.md").read_text(encoding="utf-8")
RECIPE, FAMILY, *_ = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


def test_what_it_says_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "RECIPES", dict(families.RECIPES))
    exec(RECIPE, vars(families))
    (name,) = re.findall(r'RECIPES\["(\w+)"\]', RECIPE)
    folder = families.family_model(name)
    (refused,) = re.findall(r"`(architecture '\w+' is not supported)`", GUIDE)
    with pytest.raises(BlockyardError) as caught:
        load_model(folder, None, torch.device("cpu"), lambda done_bytes, total_bytes: None, model_code="native")
    assert caught.value.message.startswith(refused)

    (architecture,) = re.findall(r'FAMILIES\["(\w+)"\]', FAMILY)
    there = {**vars(relatives), "FAMILIES": dict[str, object]()}
    exec(FAMILY, there)
    monkeypatch.setitem(table.FAMILIES, architecture, there["FAMILIES"][architecture])
    token_ids = list(range(3, 90))
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([token_ids])).logits[0]
    got = StepRunner.load(folder, torch.float32).run("whole", token_ids, [len(token_ids)])
    assert (got - expected).abs().max() <= 2e-5 * expected.abs().max()
