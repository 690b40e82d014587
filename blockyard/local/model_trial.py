"""Has a process of the worker's code try a network of transformers', which this one imports nothing of."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING

from blockyard.local.supervisor import ROOT

if TYPE_CHECKING:
    from pathlib import Path

MODULE = "worker_service.models.fallback.trial"
SECONDS = 120.0


@cache
def find_refusal(folder: Path, dtype: str) -> str | None:
    """Finds why a worker would refuse a model that transformers' code computes, by its config.json alone.

    Args:
        folder: of the model.
        dtype: as of `read_outline`.

    Returns:
        The sentence; empty: it would not. None: it cannot be tried here.
    """
    command = [sys.executable, "-m", MODULE, str(folder.absolute()), dtype]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None
    return json.loads(done.stdout.splitlines()[-1])["refusal"] if done.returncode == 0 else None
