"""What is kept of a run, and what it says of its machine."""

import json
from pathlib import Path

import pytest

from benchmarks.kit import processor, record
from blockyard_kernels.cpu.processors import chosen_instruction_sets


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return tmp_path


def test_a_run_stands_beside_those_of_other_instruction_sets(folder):
    record.append("throughput-m", {"rate": 1})
    record.append("throughput-m", {"rate": 2}, "amx")
    first, second = json.loads((folder / "throughput-m.json").read_text())
    assert (first["results"], second["results"]) == ({"rate": 1}, {"rate": 2})
    assert first["machine"]["instruction_set"] == next(iter(chosen_instruction_sets()), "reference")
    assert second["machine"]["instruction_set"] == "amx"


def test_a_run_names_its_processor(folder):
    record.append("m", {})
    (run,) = json.loads((folder / "m.json").read_text())
    facts = Path("/proc/cpuinfo").read_text()
    name, _, family = run["machine"]["processor"].partition(" (")
    assert name in facts
    assert family.startswith("family ")
    assert set(run["machine"]["flags"].split()) <= set(facts.split())
    assert ("avx2" in run["machine"]["flags"].split()) == (" avx2 " in facts)


def test_without_kernels_of_ours_it_is_the_reference(monkeypatch):
    monkeypatch.setattr(processor, "chosen_instruction_sets", lambda: ())
    assert processor.instruction_set() == "reference"
