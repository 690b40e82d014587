"""The services as processes of a test: none outlives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kit.processes.system import ROOT, System

if TYPE_CHECKING:
    from pathlib import Path


def test_a_system_that_does_not_start_leaves_no_process(tmp_path: Path) -> None:
    system = System(ROOT / "models" / "demo", tmp_path, gateway_flags=["--no-such-flag"])
    with pytest.raises(AssertionError, match="gateway ended with 2"), system:
        pass
    assert list(system.services) == ["worker", "scheduler", "gateway"]
    assert None not in [service.process.poll() for service in system.services.values()]
