from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from blockyard import Client
from blockyard.local import supervisor
from tests.kit.processes import nursery
from tests.kit.processes.system import ROOT, System

if TYPE_CHECKING:
    from collections.abc import Iterator

DEMO = ROOT / "models" / "demo"


@pytest.fixture(scope="module", autouse=True)
def forked_services(request: pytest.FixtureRequest) -> Iterator[None]:
    """Has a supervisor in the test's own process fork its services; tests of it start them anew."""
    with pytest.MonkeyPatch.context() as patch:
        if "integration.blockyard.local." not in request.module.__name__:
            patch.setattr(supervisor, "start_process", nursery.start_process)
        yield


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
