"""The examples of agents on the real services and the demo model, with packages of others.

Needs packages from the network.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.kit.processes.environments import Environment
from tests.kit.processes.system import ROOT, System

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

EXAMPLES = ROOT / "examples"
DEMO = ROOT / "models" / "demo"
FLAGS = ["--dtype", "float32", "--num-device-blocks", "400"]
# The demo model's own knows no tools.
TEMPLATE = ["--chat-template", str(EXAMPLES / "tools.jinja")]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(DEMO, tmp_path_factory.mktemp("agents"), FLAGS, gateway_flags=TEMPLATE) as system:
        yield system


def check_example(output: str) -> None:
    lines = output.splitlines()
    assert lines[-2].startswith("says ")
    assert lines[-1].startswith("parsed ")


def test_the_example_in_python_runs(demo: System, tmp_path: Path) -> None:
    environment = Environment.with_packages(tmp_path / "environment", "openai", "pydantic")
    check_example(environment.run("python", str(EXAMPLES / "agent.py"), demo.http_url))


def test_the_example_in_node_runs(demo: System, tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    shutil.copytree(EXAMPLES / "node-agent", folder, ignore=shutil.ignore_patterns("node_modules", "package-lock.json"))
    install = ["npm", "install", "--no-audit", "--no-fund"]
    subprocess.run(install, cwd=folder, check=True, timeout=400, capture_output=True)
    line = ["node", "index.js", demo.http_url]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    check_example(done.stdout)
