"""How often a service looks through all that it holds: in a process of its own, whose collector it may tune."""

from __future__ import annotations

import subprocess
import sys

# Some two thousand open streams of a gateway.
NUM_OBJECTS = 500_000
PROGRAM = f"""
import gc
from blockyard.service.process import tune_collector

generations = []
gc.callbacks.append(lambda phase, facts: generations.append(facts["generation"]) if phase == "start" else None)
tune_collector()
generations.clear()
held = [[] for _ in range({NUM_OBJECTS})]
print(generations.count(0), generations.count(2))
"""


def test_what_is_held_is_not_looked_through_again_and_again_while_more_comes() -> None:
    told = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    num_young, num_full = map(int, told.split())
    assert num_young > 0
    assert num_full == 0
