"""The digest of the source changes with whatever code decides what a model answers."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from worker_service.models import source

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "file",
    ["models/layers.py", "sampling/sampler.py", "grammars/matchers.py", "pooling/head.py", "lora/adapter.py"],
)
def test_code_that_decides_an_answer_changes_the_digest(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(source._WORKER, tmp_path / "worker", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(source, "_WORKER", tmp_path / "worker")
    before = source.source_digest()
    changed = tmp_path / "worker" / file
    changed.write_text(changed.read_text() + "\n")
    assert source.source_digest() != before
