"""The services of docker-compose.yml as containers of a test: built, started and stopped as an operator does it.

The `docker` package looks at what runs, and compose does what users do with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from docker.models.containers import Container

    from docker import DockerClient

ROOT = Path(__file__).parents[3]
BUILD_SECONDS = 1500.0
START_SECONDS = 180.0
POLL_SECONDS = 0.1
PORT_VARIABLES = {
    "grpc": "BLOCKYARD_GRPC_PORT",
    "http": "BLOCKYARD_HTTP_PORT",
    "prometheus": "PROMETHEUS_PORT",
}
PROJECT_LABEL = "com.docker.compose.project"
SERVICE_LABEL = "com.docker.compose.service"


def compose_program() -> list[str]:
    """Compose as a part of `docker`, else the program of its own that it was before."""
    plugin = ["docker", "compose"]
    has_plugin = shutil.which("docker") and not subprocess.run([*plugin, "version"], capture_output=True).returncode
    return plugin if has_plugin else ["docker-compose"]


def is_healthy(container: Container) -> bool:
    """Whether its health check says so, now."""
    container.reload()
    return container.attrs["State"].get("Health", {}).get("Status") == "healthy"


def wait_until(condition: Callable[[], bool], seconds: float = START_SECONDS) -> None:
    """Polls: what containers do sets no event here."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(POLL_SECONDS)


class Project:
    """One project of compose, with its own name, ports and settings.

    Args:
        variables: for docker-compose.yml, before those of `.env`.
        ports: of this machine, where "grpc" and "http" of the gateway and "prometheus" are published.
    """

    def __init__(self, engine: DockerClient, name: str, variables: Mapping[str, str], ports: Mapping[str, int]) -> None:
        self.engine = engine
        self.name = name
        self._program = compose_program()
        self._ports = ports
        published = {PORT_VARIABLES[kind]: str(port) for kind, port in ports.items()}
        self.environment = {**os.environ, **variables, **published, "COMPOSE_PROJECT_NAME": name}

    def port(self, kind: str) -> int:
        """Where something is published."""
        return self._ports[kind]

    @property
    def grpc_target(self) -> str:
        """The public gRPC API."""
        return f"127.0.0.1:{self.port('grpc')}"

    def run(self, command: list[str], seconds: float = START_SECONDS) -> str:
        """Runs a program with the project's variables in the repository's root, and returns all that it wrote."""
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def compose(self, *arguments: str, seconds: float = START_SECONDS) -> str:
        """Runs compose."""
        return self.run([*self._program, *arguments], seconds)

    def build(self) -> None:
        """Builds both images."""
        self.compose("build", seconds=BUILD_SECONDS)

    def up(self, *arguments: str) -> None:
        """Starts what does not run, and waits until everything is healthy."""
        self.compose("up", "--detach", *arguments)
        self.wait_until_healthy()

    def remove(self) -> None:
        """Leaves nothing but the images."""
        self.down()
        for volume in self.engine.volumes.list(filters={"label": f"{PROJECT_LABEL}={self.name}"}):
            volume.remove()

    def down(self) -> None:
        """Stops and removes everything, of all profiles."""
        self.run(["make", "down"])

    def containers(self, service: str = "") -> list[Container]:
        """The containers, of one service or of all, those that have ended included."""
        labels = [f"{PROJECT_LABEL}={self.name}", *([f"{SERVICE_LABEL}={service}"] if service else [])]
        return self.engine.containers.list(all=True, filters={"label": labels})

    def container(self, service: str) -> Container:
        """A service's only one."""
        (only,) = self.containers(service)
        return only

    def wait_until_healthy(self) -> None:
        """Waits for every container."""
        wait_until(lambda: all(is_healthy(container) for container in self.containers()))

    def events(self, since: datetime, *kinds: str) -> list[tuple[str, dict[str, Any]]]:
        """What the engine saw happen to its containers since then: pairs of service and event, in order."""
        filters = {"label": f"{PROJECT_LABEL}={self.name}", "event": list(kinds)}
        seen = self.engine.events(since=since.timestamp(), until=now().timestamp(), decode=True, filters=filters)
        return [(event["Actor"]["Attributes"][SERVICE_LABEL], event) for event in seen]


def now() -> datetime:
    """The time as the engine's events have it."""
    return datetime.now(UTC)
