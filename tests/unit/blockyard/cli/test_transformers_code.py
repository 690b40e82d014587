"""`blockyard plan` and `blockyard doctor` on models that transformers' code computes: they say so."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from blockyard.cli.doctor.findings import Finding, Level
from blockyard.cli.doctor.model import look_at_code
from blockyard.configuration import ModelSettings, SystemConfiguration, WorkerProcessSettings
from tests.unit.blockyard.cli.invoking import run

if TYPE_CHECKING:
    from pathlib import Path

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> str:
    fields = {"architectures": ["ApertusForCausalLM"], "model_type": "apertus", "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return str(tmp_path)


def findings(model: str, model_code: str = "auto") -> list[Finding]:
    worker = replace(WorkerProcessSettings(), model_code=model_code)
    return list(look_at_code(replace(SystemConfiguration(), model=ModelSettings(model), worker=worker)))


def test_a_plan_says_who_computes_and_what_is_not_known(model: str, capsys: Captured) -> None:
    assert run("plan", model) == 0
    told = capsys.readouterr().out
    assert "ApertusForCausalLM, bfloat16\ntransformers' own code computes this model" in told
    assert "is known once a worker has loaded it" in told
    assert run("plan", model, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["model"] == {"architecture": "ApertusForCausalLM", "dtype": "bfloat16", "code": "transformers"}


def test_a_plan_tells_what_would_be_refused(model: str, capsys: Captured) -> None:
    assert run("plan", model, "--quantization", "int8", "--tensor-parallel-size", "2") == 1
    assert "ApertusForCausalLM, and takes no --quantization int8, no replica of 2 workers" in capsys.readouterr().out
    assert run("plan", model, "--model-code", "native") == 1
    assert "architecture 'ApertusForCausalLM' is not supported" in capsys.readouterr().out


def test_the_doctor_says_who_computes(model: str) -> None:
    (found,) = findings(model)
    assert found.level is Level.WARN
    assert found.text.startswith("ApertusForCausalLM: transformers' own code computes this model")
    (found,) = findings(model, "native")
    assert found.level is Level.FAIL
    assert "'ApertusForCausalLM' is not supported" in found.text
    assert findings("") == []
