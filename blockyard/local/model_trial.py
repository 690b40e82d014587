"""Tries a model of transformers' code in a process of the worker's code; imports no transformers here."""

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
    """Returns why a worker would refuse a model that transformers' code computes, from config.json alone.

    Args:
        folder: the model's folder.
        dtype: as for `read_outline`.

    Returns:
        The reason as a sentence; empty: it would not be refused. None: it cannot be tried here.
    """
    command = [sys.executable, "-m", MODULE, str(folder.absolute()), dtype]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None
    return json.loads(done.stdout.splitlines()[-1])["refusal"] if done.returncode == 0 else None
