"""The engine, the images and the project that the tests of containers share, and the sizes that they found."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import docker
from tests.kit.processes.cluster import choose_ports
from tests.kit.processes.containers import PORT_VARIABLES, Project

if TYPE_CHECKING:
    from collections.abc import Iterator

    from docker import DockerClient

TAG = "e2e"
# Always the same: at another address they would be another build, and nothing of the last one would be used again.
WHEELS_PORT = 20_111
BASE_IMAGE = os.environ.get("BASE_IMAGE", "python:3.12-slim")
FIGURES: pytest.StashKey[list[str]] = pytest.StashKey()
# Small pools: two workers and the rest of a developer's machine share its memory.
SETTINGS = """
BLOCKYARD_NUM_DEVICE_BLOCKS=1200
BLOCKYARD_NUM_HOST_BLOCKS=32
BLOCKYARD_NUM_THREADS=1
"""


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> list[str]:
    """Lines that are shown after the run."""
    return request.config.stash.setdefault(FIGURES, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(FIGURES, []):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def engine() -> Iterator[DockerClient]:
    client = docker.from_env()
    client.ping()
    yield client
    client.close()


@pytest.fixture(scope="session")
def wheels() -> Iterator[dict[str, str]]:
    """Build arguments for the wheels that pip finds in a folder of this machine, where it is told of one."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    folder = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not (folder and Path(folder).is_dir()):
        yield {}
        return
    with ThreadingHTTPServer(("127.0.0.1", WHEELS_PORT), partial(QuietHandler, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield {"PIP_FIND_LINKS": f"http://127.0.0.1:{server.server_port}/", "TORCH_INDEX_URL": ""}
        server.shutdown()
        thread.join()


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves a folder without a line for each request."""

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture(scope="session")
def project(
    engine: DockerClient, wheels: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Project]:
    """The compose file's project with its images built, and nothing started."""
    settings = tmp_path_factory.mktemp("compose") / "settings.env"
    settings.write_text(SETTINGS)
    variables = {
        **wheels,
        "BASE_IMAGE": BASE_IMAGE,
        # The wheels are served on loopback.
        "BUILD_NETWORK": "host",
        "BLOCKYARD_TAG": TAG,
        "BLOCKYARD_SETTINGS": str(settings),
    }
    ports = dict(zip(PORT_VARIABLES, choose_ports(len(PORT_VARIABLES)), strict=True))
    project = Project(engine, f"blockyard-e2e-{os.getpid()}", variables, ports)
    project.build()
    yield project
    project.remove()
