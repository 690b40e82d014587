"""`blockyard plan` and `blockyard doctor` on models that transformers' code computes: they say so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from blockyard.cli.doctor.findings import Finding, Level
from blockyard.cli.doctor.model import look_at_code
from blockyard.cli.plan import tell_outline
from blockyard.configuration import ModelSettings, SystemConfiguration, WorkerProcessSettings
from blockyard.local.model_check import read_model
from blockyard.model_config.fallback import Outline
from tests.unit.blockyard.cli.invoking import run

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> str:
    fields = {"architectures": ["ApertusForCausalLM"], "model_type": "apertus", "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return str(tmp_path)


def findings(model: str, model_code: str = "auto") -> list[Finding]:
    worker = replace(WorkerProcessSettings(), model_code=model_code)
    return list(look_at_code(replace(SystemConfiguration(), model=ModelSettings(model), worker=worker)))


@pytest.mark.parametrize("as_json", [True, False])
def test_a_plan_says_who_computes_and_what_is_not_known(model: str, as_json: bool, capsys: Captured) -> None:
    outline = read_model(Path(model), SystemConfiguration())
    assert isinstance(outline, Outline)
    tell_outline(outline, as_json=as_json)
    told = capsys.readouterr().out
    assert "transformers' own code computes this model" in told
    assert "is known once a worker has loaded it" in told
    if as_json:
        facts = {"architecture": "ApertusForCausalLM", "dtype": "bfloat16", "code": "transformers"}
        assert (json.loads(told)["model"], json.loads(told)["refusal"]) == (facts, "")


def test_a_plan_tells_what_would_be_refused(model: str, capsys: Captured) -> None:
    assert run("plan", model, "--quantization", "int8", "--tensor-parallel-size", "2") == 1
    assert "ApertusForCausalLM, and takes no --quantization int8, no replica of 2 workers" in capsys.readouterr().out
    assert run("plan", model, "--model-code", "native") == 1
    assert "architecture 'ApertusForCausalLM' is not supported" in capsys.readouterr().out


def test_doctor_and_plan_say_what_a_worker_would_refuse(tmp_path: Path, capsys: Captured) -> None:
    fields = {"architectures": ["BloomForCausalLM"], "model_type": "bloom"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (found,) = findings(str(tmp_path))
    assert found.level is Level.FAIL
    assert "BloomForCausalLM cannot be served: its attention cannot be replaced" in found.text
    assert run("plan", str(tmp_path)) == 1
    assert f"would be refused: {found.text}" in capsys.readouterr().out


def test_the_doctor_says_what_has_no_code_of_ours(model: str) -> None:
    (found,) = findings(model, "native")
    assert found.level is Level.FAIL
    assert "'ApertusForCausalLM' is not supported" in found.text
    assert findings("") == []
