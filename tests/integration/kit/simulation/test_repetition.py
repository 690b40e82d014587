from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

import pytest

from tests.integration.kit.simulation.random_program import CLIENTS, NUM_CALLS, run_program

if TYPE_CHECKING:
    from tests.kit.simulation.loop import Outcome

SEEDS = range(50)


@cache
def first_run(seed: int) -> Outcome[Counter[str]]:
    return run_program(seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_repeats(seed: int) -> None:
    assert run_program(seed) == first_run(seed)


def test_all_calls_end_and_in_all_ways() -> None:
    ways: Counter[str] = Counter()
    for seed in SEEDS:
        result = first_run(seed).result
        assert result.total() == len(CLIENTS) * NUM_CALLS
        ways += result
    codes = {way.partition(" ")[2] for way in ways}
    assert {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "ABORTED"} <= codes


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_a_process_with_another_hash_seed_repeats_seeds(hash_seed: str) -> None:
    command = [sys.executable, "-m", "tests.integration.kit.simulation.random_program", "0", "1", "2"]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    answer = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    assert answer.stdout.split() == [first_run(seed).trace_hash for seed in range(3)]
