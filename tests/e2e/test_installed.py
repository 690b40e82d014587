"""The wheel in new environments: the client library alone, beside a client of others, and the whole that serves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from tests.kit.fakes.fake_gateway import FakeGateway
from tests.kit.processes.wheel import ROOT, build_wheel

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3000)]

INSTALL_SECONDS = 1200
CALL = """
import sys
from blockyard import Client
with Client(sys.argv[1]) as client:
    print(client.generate("one two", max_tokens=2).text)
"""


class Environment:
    """A virtual environment, where nothing of this one is found."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=100)
        self.bin = folder / "bin"
        self.home = folder.parent

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "BLOCKYARD_"))}
        return {**kept, "HOME": str(self.home), "PATH": f"{self.bin}:/usr/local/bin:/usr/bin:/bin"}

    def run(self, *command: str, seconds: float = 100) -> str:
        """Runs a command of it, in an empty folder, and returns what it wrote."""
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.home, env=self.environment(), capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, *wanted: str) -> None:
        """Installs packages, with what they need."""
        self.run("python", "-m", "pip", "install", "--quiet", *wanted, seconds=INSTALL_SECONDS)

    def packages(self) -> set[str]:
        """What is installed, but for what every environment has."""
        listed = json.loads(self.run("python", "-m", "pip", "list", "--format=json"))
        return {item["name"].lower() for item in listed} - {"pip", "setuptools"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_client_needs_two_packages_and_shares_an_environment_with_tritons(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv")
    environment.install(str(wheel))
    # What grpcio itself needs is with it.
    assert environment.packages() - {"typing-extensions", "typing_extensions"} == {"blockyard", "grpcio", "protobuf"}
    with FakeGateway().in_thread() as gateway:
        assert environment.run("python", "-c", CALL, gateway.target) == "one two\n"
        environment.install("protobuf==6.31.1")
        assert environment.run("python", "-c", CALL, gateway.target) == "one two\n"
        environment.install("--upgrade", "tritonclient[grpc]", "protobuf<7")
        assert environment.run("python", "-c", "import tritonclient.grpc\n" + CALL, gateway.target) == "one two\n"
    environment.run("python", "-m", "pip", "check")


def test_a_wheel_serves_the_demo_model_with_kernels_of_its_own(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv")
    index = os.environ.get("TORCH_INDEX_URL", "")
    torch = ["sh", str(ROOT / "install_torch.sh"), str(environment.bin / "python"), index]
    subprocess.run(torch, env=environment.environment(), check=True, timeout=INSTALL_SECONDS)
    environment.install(f"{wheel}[serve]")
    ports = ["--grpc-port=0", "--http-port=0", "--admin-port=0", "--num-device-blocks=60"]
    server = subprocess.Popen(
        [str(environment.bin / "blockyard"), "serve", *ports],
        cwd=tmp_path, env=environment.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines: list[str] = []
    is_ready = threading.Event()

    def read() -> None:
        assert server.stdout is not None
        for line in server.stdout:
            lines.append(line)
            if "gRPC   " in line:
                is_ready.set()
        is_ready.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        # The kernels are compiled first: minutes, and many more on a busy machine.
        assert is_ready.wait(2400)
        target = re.search(r"gRPC   (\S+)", "".join(lines))
        assert target, "".join(lines)
        text = environment.run("blockyard", "generate", "def read_lines(path):", "--target", target[1])
        assert text.strip()
    finally:
        server.terminate()
        reader.join(60)
        server.communicate(timeout=60)
    log = "".join(lines)
    assert "compiling the CPU kernels, once" in log
    assert "the reference kernels serve" not in log
    assert list((tmp_path / ".cache" / "blockyard" / "kernels").rglob("avx2.so"))
