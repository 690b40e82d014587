"""The wheel in new environments: the client library alone, beside a client of others, and the whole that serves.

BLOCKYARD_TEST_WHEEL names a wheel that is built, as `make wheel-test` has it; else one is built here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from blockyard_kernels.cpu.build import INSTRUCTION_SETS
from blockyard_kernels.cpu.processors import this_processor
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
        # No compiler is on this path.
        return {**kept, "HOME": str(self.home), "PATH": str(self.bin)}

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
    if path := os.environ.get("BLOCKYARD_TEST_WHEEL"):
        return ROOT / path
    return build_wheel(tmp_path_factory.mktemp("wheel"))[0]


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


class Server:
    """`blockyard serve` of an environment, with the demo model."""

    def __init__(self, environment: Environment, folder: Path) -> None:
        self.environment = environment
        self.lines: list[str] = []
        ports = ["--grpc-port=0", "--http-port=0", "--admin-port=0", "--num-device-blocks=60"]
        self._process = subprocess.Popen(
            [str(environment.bin / "blockyard"), "serve", *ports],
            cwd=folder, env=environment.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            if "gRPC   " in line:
                self._is_ready.set()
        self._is_ready.set()

    def generate(self) -> str:
        """Returns what the command line gets from it."""
        assert self._is_ready.wait(600)
        target = re.search(r"gRPC   (\S+)", "".join(self.lines))
        assert target, "".join(self.lines)
        return self.environment.run("blockyard", "generate", "def read_lines(path):", "--target", target[1])

    def stop(self) -> str:
        """Ends it, and returns all that it wrote."""
        self._process.terminate()
        self._reader.join(60)
        self._process.communicate(timeout=60)
        return "".join(self.lines)


def serve_once(environment: Environment, folder: Path) -> str:
    """Has one text generated, and returns what the server wrote."""
    server = Server(environment, folder)
    try:
        assert server.generate().strip()
    finally:
        log = server.stop()
    return log


@pytest.fixture(scope="module")
def serving(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with all that serves."""
    environment = Environment(tmp_path_factory.mktemp("serving") / "venv")
    torch = ["/bin/sh", str(ROOT / "install_torch.sh"), str(environment.bin / "python")]
    variables = {**environment.environment(), "PATH": f"{environment.bin}:/usr/bin:/bin"}
    subprocess.run([*torch, os.environ.get("TORCH_INDEX_URL", "")], env=variables, check=True, timeout=INSTALL_SECONDS)
    environment.install(f"{wheel}[serve]")
    return environment


# A package of another maker, called `kernels`, which transformers looks for.
OTHER_KERNELS = """
import kernels
import torch
import transformers.utils
from blockyard_kernels.select import get_backend
backend = get_backend(torch.device("cpu"), torch.float32)
print(kernels.get_kernel.__name__, transformers.utils.is_kernels_available(), backend.name)
"""


def test_it_shares_an_environment_with_the_kernels_of_hugging_face(serving: Environment, tmp_path: Path) -> None:
    serving.install("transformers[kernels]")
    assert serving.run("python", "-c", OTHER_KERNELS).startswith("get_kernel True cpu/")
    assert serve_once(serving, tmp_path)
    serving.run("python", "-m", "pip", "uninstall", "--yes", "kernels")
    assert serve_once(serving, tmp_path)


# Whether each set's kernels are those of the wheel, and whether those of this processor pass their self-test.
KERNELS = """
import torch
from blockyard_kernels.cpu.backend import CpuBackend
from blockyard_kernels.cpu.build import INSTRUCTION_SETS, library_path
from blockyard_kernels.cpu.processors import available_instruction_sets
for name in INSTRUCTION_SETS:
    print(name, "site-packages" in str(library_path(name)), library_path(name).exists())
for name in available_instruction_sets():
    print(name, CpuBackend(torch.float32, name, "none").arithmetic is not None)
"""


def test_a_wheel_serves_the_demo_model_without_a_compiler(serving: Environment, tmp_path: Path) -> None:
    expected = [f"{name} True True" for name in INSTRUCTION_SETS]
    expected += [f"{choice.name} True" for choice in this_processor().supported() if not choice.emulates]
    assert serving.run("python", "-c", KERNELS).splitlines() == expected
    log = serve_once(serving, tmp_path)
    assert "compil" not in log
    assert "the reference kernels serve" not in log
    assert not list(serving.home.rglob(".cache/blockyard/kernels"))
    serving.run("python", "-m", "pip", "check")


def test_without_compiled_kernels_and_a_compiler_it_says_so_and_serves(serving: Environment, tmp_path: Path) -> None:
    """A wheel of the source alone, as pip builds it on a machine without a compiler."""
    wheel, _ = build_wheel(tmp_path / "wheel", has_compiler=False)
    serving.install("--no-deps", "--force-reinstall", str(wheel))
    log = serve_once(serving, tmp_path)
    assert "no C++ compiler: workers on a CPU will use the reference kernels, which are slower; install g++" in log
