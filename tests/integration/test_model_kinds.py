"""Layers with states, mixtures, quantized checkpoints and KV in int8 through whole processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kit.oracles.model_kinds import check_kind

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("kind", ["qwen3_next_ranks", "gpt_oss", "awq", "granite_hybrid", "int8_kv", "lfm2_moe_ranks"])
async def test_answers_are_those_of_running_alone(kind: str, tmp_path: Path) -> None:
    await check_kind(kind, tmp_path)
