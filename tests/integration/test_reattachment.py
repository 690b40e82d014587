"""A scheduler that has just begun forgets nobody: a short form of `python -m tests.kit.chaos.scheduler_kills`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kit.chaos.scheduler_kills import run_scheduler_kills

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.timeout(180)
async def test_clients_resume_and_cancel_at_another_gateway_while_the_scheduler_dies(tmp_path: Path) -> None:
    report = await run_scheduler_kills(2, tmp_path)
    assert not report.failures, str(report)
    assert (report.num_resumed, report.num_cancelled) == (2, 2)
