"""What a user's process loads with the client library."""

from __future__ import annotations

import subprocess
import sys

import pytest

import blockyard
import blockyard.client

SERVERS = {"blockyard.service", "blockyard.local", "blockyard.cli", "blockyard.security.authentication"}
# Where they are installed, grpc itself imports grpc_health and grpc_reflection, but not what is in them.
PACKAGES = {"grpc_reflection.v1alpha", "grpc_health.v1", "pydantic", "yaml", "typer", "rich", "opentelemetry"}
CLIENTS = "from blockyard.client import Client, AsyncClient"


@pytest.mark.parametrize(
    "program", [CLIENTS, "import blockyard.client.sync, blockyard.client.asynchronous", "from blockyard import Client"]
)
def test_a_client_loads_neither_servers_nor_their_packages(program: str) -> None:
    code = f"{program}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not (SERVERS | PACKAGES) & set(run.stdout.split())


def test_the_gateways_roles_load_no_client() -> None:
    code = "import blockyard.client.chat, sys\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "grpc" not in run.stdout.split()


def test_the_library_hands_on_what_the_package_does() -> None:
    for name in blockyard.client.__all__:
        assert getattr(blockyard, name) is getattr(blockyard.client, name)
    assert set(blockyard.__all__) - set(blockyard.client.__all__) == {
        *("LLM", "LoRARequest", "BlockyardError", "Reason", "Violation", "__version__")
    }
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = blockyard.client.missing
