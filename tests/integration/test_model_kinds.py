"""A mixture, a quantized checkpoint and KV in int8 through whole processes; other kinds are the oracle's own run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kit.oracles.model_kinds import check_kind

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("kind", ["gpt_oss", "awq", "int8_kv"])
async def test_answers_are_those_of_running_alone(kind: str, tmp_path: Path) -> None:
    await check_kind(kind, tmp_path)
