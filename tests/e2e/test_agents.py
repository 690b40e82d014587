"""Loops of agents with a tool that is forced, on the real services and the demo model, by clients of others.

Needs packages from the network.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.kit.processes.environments import Environment
from tests.kit.processes.system import ROOT, System

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

EXAMPLES = ROOT / "examples"
DEMO = ROOT / "models" / "demo"
FLAGS = ["--dtype", "float32", "--num-device-blocks", "400"]
# The demo model's own knows no tools.
TEMPLATE = ["--chat-template", str(EXAMPLES / "tools.jinja")]
PACKAGES = {
    "anthropic": ["anthropic"],
    "litellm": ["litellm", "mcp"],
    "agents": ["openai-agents"],
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(DEMO, tmp_path_factory.mktemp("agents"), FLAGS, gateway_flags=TEMPLATE) as system:
        yield system


@pytest.mark.parametrize("client", PACKAGES)
def test_a_client_runs_a_loop(demo: System, tmp_path: Path, client: str) -> None:
    environment = Environment.with_packages(tmp_path / "environment", *PACKAGES[client])
    program = str(ROOT / "tests" / "e2e" / "agent_loops.py")
    output = environment.run("python", program, client, demo.http_url, LITELLM_LOCAL_MODEL_COST_MAP="True")
    told = json.loads(output.splitlines()[-1])
    assert told["called"]
    assert isinstance(told["said"], str)


def check_example(output: str) -> None:
    lines = output.splitlines()
    assert lines[0].startswith("calls temperature(")
    assert lines[-1].startswith("parsed ")


def test_the_example_in_python_runs(demo: System, tmp_path: Path) -> None:
    environment = Environment.with_packages(tmp_path / "environment", "openai", "pydantic")
    check_example(environment.run("python", str(EXAMPLES / "agent.py"), demo.http_url, "required"))


def test_the_example_in_node_runs(demo: System, tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    shutil.copytree(EXAMPLES / "node-agent", folder, ignore=shutil.ignore_patterns("node_modules", "package-lock.json"))
    install = ["npm", "install", "--no-audit", "--no-fund"]
    subprocess.run(install, cwd=folder, check=True, timeout=400, capture_output=True)
    line = ["node", "index.js", demo.http_url, "required"]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    check_example(done.stdout)
