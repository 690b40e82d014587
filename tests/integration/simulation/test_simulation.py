"""Simulated clusters keep every promise: on some seeds, and on those that once failed.

`make sim` plays more of them; `python -m tests.kit.simulation replay SEED` plays one again.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kit.fakes import fake_worker
from tests.kit.processes.system import ROOT
from tests.kit.simulation.__main__ import main, scenario_of
from tests.kit.simulation.play import play
from tests.kit.simulation.shrink import shrink

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_SEEDS = 24
_seed = fake_worker.seed_of_payload
KNOWN = tomllib.loads((Path(__file__).parent / "seeds.toml").read_text(encoding="utf-8"))["seeds"]
REPEATED = [f"repeated/{number}" for number in range(2)]
REPEAT = f"""
import logging
logging.disable(logging.CRITICAL)
from tests.kit.simulation.__main__ import scenario_of
from tests.kit.simulation.play import play
print(*(play(scenario_of(seed)).trace_hash for seed in {REPEATED}))
"""


@pytest.fixture(autouse=True)
def no_logs() -> Iterator[None]:
    """Thousands of lines that nobody reads."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_seeds_keep_every_promise(seed: int) -> None:
    assert play(scenario_of(seed)).violations == []


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: str(known["seed"]))
def test_what_was_found_stays_mended(known: dict[str, str]) -> None:
    assert play(scenario_of(known["seed"])).violations == [], known["found"]


def test_a_seed_repeats_in_any_process() -> None:
    there = subprocess.run(
        [sys.executable, "-c", REPEAT],
        cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert there.stdout.split() == [play(scenario_of(seed)).trace_hash for seed in REPEATED]


def test_the_program_runs_and_replays(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program = ["simulation", "run", "--seed", "1028", "--minutes", "0", "--processes", "1"]
    monkeypatch.setattr(sys, "argv", program)
    assert main() == 0
    assert "0 failed" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["simulation", "replay", "1028"])
    assert main() == 0
    assert "all promises were kept" in capsys.readouterr().out


def test_a_failing_scenario_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a worker that gives a wrong token whenever it samples for one of the requests."""
    guilty = 7
    scenario = scenario_of("shrunk")
    seed = next(ask.seed for ask in scenario.asks if ask.number == guilty)
    monkeypatch.setattr(fake_worker, "seed_of_payload", lambda spec: _seed(spec) + (_seed(spec) == seed))
    smaller = shrink(scenario)
    assert [ask.number for ask in smaller.asks] == [guilty]
    assert smaller.faults == []
