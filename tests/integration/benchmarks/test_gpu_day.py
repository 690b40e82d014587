"""benchmarks/gpu_day.sh on a processor: all stages, what they leave, and what an interrupted one leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import report as gpu_report
from benchmarks.gpu import stage as gpu_stage
from benchmarks.gpu.steps import idle_between

ROOT = Path(__file__).parents[3]
TIMES = ("ops", "steps", "table")
FILES = {*(f"{name}.json" for name in ("machine", *TIMES, "oracle", "stages")), "tests.xml", "log.txt"}


@pytest.mark.timeout(900)
def test_a_dry_day_leaves_every_result(tmp_path: Path) -> None:
    """Seven processes, most of which import torch, one after another: it takes some seconds for each."""
    environment = {**os.environ, "OUT": str(tmp_path / "out"), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "benchmarks/gpu_day.sh", "--dry"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    log = (tmp_path / "out" / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    stages = json.loads((tmp_path / "out" / "stages.json").read_text())
    assert [stage["outcome"] for stage in stages] == ["done"] * 6
    lines = [line for name in TIMES for line in json.loads((tmp_path / "out" / f"{name}.json").read_text()).items()]
    assert [line for line in lines if "error" in line[1]] == []
    page = done.stdout
    for told in (
        "## The machine",
        "0 failures, 0 errors",
        "| linear gate_up 3 rows, our kernel |",
        "| linear down 3 rows, int8 |",
        "| paged_attention prefill 12, invariant |",
        "They were not checked: kernels are interpreted.",
        "| decode 2 x 20, invariant |",
        "| decode 2 x 20, no graphs |",
        "| decode 2 x 20, 8 adapters of rank 16 |",
        "batch_invariant: True",
        "num_stages 3, programs_per_multiprocessor 2 (as it is) |",
        "| kill | 0 of",
    ):
        assert told in page
    assert "Not " not in page
    assert (
        subprocess.run(["git", "status", "--porcelain", "benchmarks/results"], cwd=ROOT, capture_output=True).stdout
        == b""
    )


def test_an_argument_that_is_not_known_is_told() -> None:
    done = subprocess.run(
        ["bash", "benchmarks/gpu_day.sh", "--fast"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "unknown argument --fast" in done.stderr


def test_what_was_found_stays_when_a_stage_is_ended(tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text(json.dumps({"ceilings": {"bandwidth": 1e9, "bfloat16": 1e12}}))
    stage = gpu_stage.Stage(torch.device("cpu"), True, tmp_path / "ops.json")
    stage.measure("good", lambda: None, {"bandwidth": 1e6, "bfloat16": 2e12, "to_host": 1e18})

    def fails() -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate\nmuch")

    stage.measure("bad", fails, {})
    with pytest.raises(KeyboardInterrupt):
        stage.measure("ended", lambda: (_ for _ in ()).throw(KeyboardInterrupt()), {})
    kept = json.loads((tmp_path / "ops.json").read_text())
    assert kept["bad"] == {"error": "CUDA out of memory. Tried to allocate"}
    assert kept["good"]["ideal_seconds"] == 2.0, "the longest of those whose ceiling is known"
    page = gpu_report.report(tmp_path)
    assert "| bad | CUDA out of memory. Tried to allocate | | |" in page
    assert "| good |" in page
    assert page.count("Not measured.") == 2
    assert "Not run." in page


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        # Steps of 1 s, each of two works that a short pause divides; 0.2 s and 0.4 s between them.
        ([(0, 0.5), (0.6, 1), (1.2, 1.7), (1.8, 2.2), (2.6, 3), (3.1, 3.6)], (0.3, 1 - 0.9 / 3.6)),
        # Works that overlap, and no pause at all.
        ([(0, 2), (1, 1.5), (1.8, 3)], (0.0, 1.0)),
        ([], (0.0, 0.0)),
    ],
)
def test_idle_time_is_what_lies_between_steps(spans: list[tuple[float, float]], expected: tuple[float, float]) -> None:
    found = idle_between(reversed(spans), 3)
    assert (found["seconds"], found["busy_share"]) == pytest.approx(expected)


def test_launches_are_compared_with_the_one_that_is_there(tmp_path: Path) -> None:
    def line(seconds: float, *, is_now: bool) -> dict[str, object]:
        return {"seconds": seconds, "kernel": "a", "is_now": is_now}

    lines = {"a: 4": line(0.002, is_now=True), "a: 8": line(0.001, is_now=False), "a: 16": {"error": "too large"}}
    (tmp_path / "table.json").write_text(json.dumps(lines))
    page = gpu_report.report(tmp_path)
    assert "| a: 8 | 1.000 | 2.00 |\n| a: 4 (as it is) | 2.000 | 1.00 |\n| a: 16 | too large | |" in page


def test_failed_tests_are_named(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1"><testcase classname="a.b" name="c">'
        '<failure message="x"/></testcase><testcase classname="a.b" name="d"/></testsuite></testsuites>'
    )
    page = gpu_report.report(tmp_path)
    assert "3 tests, 1 failures, 0 errors, 1 skipped." in page
    assert "- a.b::c\n" in page


def test_packages_that_are_missing_are_named() -> None:
    assert gpu_stage.missing(["torch", "no-such-package-anywhere"]) == ["no-such-package-anywhere"]
    lines = (ROOT / "benchmarks" / "gpu" / "wheels.txt").read_text().splitlines()
    names = [line for line in lines if not line.startswith("#")]
    assert names == sorted(names)
    assert gpu_stage.missing(names) == [], "all are what a checkout installs"


def test_only_packages_of_which_there_are_wheels_are_named_and_the_others_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "No_Such.Package-1.2-py3-none-any.whl").touch()
    (tmp_path / "names.txt").write_text("# why\nno-such-package\nnor-this\ntorch\n")
    arguments = ["--missing", str(tmp_path / "names.txt"), "--wheels", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["gpu_stage", *arguments])
    gpu_stage.main()
    told = capsys.readouterr()
    assert told.out == "no-such-package\n"
    assert told.err.endswith(": nor-this\n")
