"""The doctor's look at a real worker, and at the kernels of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.cli.doctor.findings import Level
from blockyard.cli.doctor.kernels import MODULE, read_answer
from blockyard.cli.doctor.services import API_VERSION, look_at_service
from blockyard.configuration import InternalSecuritySettings
from tests.kit.kernels.backends import build_kernels

if TYPE_CHECKING:
    from tests.unit.worker_service.driver import WorkerDriver

ROOT = Path(__file__).parents[3]


async def test_a_worker_answers(worker: WorkerDriver, socket_folder: Path) -> None:
    found = await look_at_service(f"unix:{socket_folder}/w", "worker", InternalSecuritySettings())
    assert found.level is Level.OK, found
    assert (await worker.info()).api_version == API_VERSION


def test_the_kernels_of_this_machine_hold() -> None:
    build_kernels()
    done = subprocess.run([sys.executable, "-m", MODULE], cwd=ROOT, capture_output=True, text=True, check=True)
    found = list(read_answer(json.loads(done.stdout)))
    assert [finding.subject for finding in found] == ["torch", "kernels on cpu"]
    assert all(finding.level is Level.OK for finding in found), found
