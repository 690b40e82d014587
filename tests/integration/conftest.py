from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from blockyard import Client
from tests.kit.processes.system import ROOT, System

if TYPE_CHECKING:
    from collections.abc import Iterator

DEMO = ROOT / "models" / "demo"


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The three services on the demo model, for all tests that leave them as they were."""
    flags = ["--dtype", "float32", "--num-device-blocks", "200", "--num-host-blocks", "50", "--debug-integrity"]
    with System(DEMO, tmp_path_factory.mktemp("demo"), flags) as system:
        yield system


@pytest.fixture(scope="module")
def client(demo: System) -> Iterator[Client]:
    """The client library's, of `demo`."""
    with Client(demo.grpc_target) as client:
        yield client
