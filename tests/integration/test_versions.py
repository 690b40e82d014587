"""Services of a later version run with those of this one: each reads the other's messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kit.versions.mixes import check_mixes
from tests.kit.versions.trees import make_newer_version

if TYPE_CHECKING:
    from pathlib import Path

# Messages that have the later version's field in at least one mix, by the service that sends them.
FILLED = {
    "gateway1": (
        "gateway.v1.RequestState",
        "inference.v1.Delta",
        "scheduler.v1.Resubmission",
        "scheduler.v1.Submission",
    ),
    "scheduler": ("scheduler.v1.AttachResponse", "worker.v1.ExecuteModelRequest", "worker.v1.NewSequence"),
    "worker": ("worker.v1.ExecuteModelResponse", "worker.v1.GetWorkerInfoResponse", "worker.v1.LoadedModel"),
}


@pytest.mark.timeout(240)
async def test_each_service_may_be_of_a_later_version(tmp_path: Path) -> None:
    system = await check_mixes(make_newer_version(tmp_path / "newer"), tmp_path / "logs")
    for name, messages in FILLED.items():
        log = system.log(name)
        assert [message for message in messages if f"fills blockyard.{message}\n" not in log] == []
