"""The benchmark of drafts: answers are replayed as decided, and its figures are there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_edits_are_replayed_with_drafts_and_without() -> None:
    command = [sys.executable, "benchmarks/edits.py", "--model", "demo", "--rounds", "1", "--concurrency", "8"]
    done = subprocess.run(
        [*command, "--workloads", "edits replayed"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    assert line.startswith("demo, edits replayed, 8: ")
    assert "ratio_of_best" in line and "(floor 1.3)" in line
