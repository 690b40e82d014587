"""What a wheel has in it, what the client library needs, and what is said where a package is missing."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import blockyard
from blockyard import extras
from blockyard_kernels.cpu.build import INSTRUCTION_SETS, library_path
from tests.kit.fakes.fake_gateway import FakeGateway
from tests.kit.kernels.backends import build_kernels
from tests.kit.processes.wheel import build_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


PACKAGES = ("blockyard", "gateway", "scheduler_service", "worker_service", "blockyard_kernels")


@pytest.fixture(scope="module")
def wheel_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this source; setuptools takes some seconds for it."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))[0]


def names_in(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as file:
        return set(file.namelist())


@pytest.fixture(scope="module")
def wheel(wheel_path: Path) -> set[str]:
    """The names of the files in a wheel."""
    return names_in(wheel_path)


def is_made(name: str) -> bool:
    """Whether a file of a wheel comes from no package's folder."""
    return bool(re.match(r"blockyard/demo_model/|blockyard-[\d.]+\.dist-info/|blockyard_kernels/cpu/built/", name))


def test_a_wheel_has_the_compiled_kernels_of_its_source(wheel_path: Path, wheel: set[str]) -> None:
    build_kernels()
    assert wheel_path.name.endswith("-py3-none-linux_x86_64.whl")
    sources = {
        f"blockyard_kernels/cpu/csrc/{path.name}" for path in (ROOT / "blockyard_kernels" / "cpu" / "csrc").iterdir()
    }
    assert {name for name in wheel if "/csrc/" in name} == sources
    libraries = {
        f"blockyard_kernels/cpu/built/{library_path(name).parent.name}/{name}.so": name for name in INSTRUCTION_SETS
    }
    assert {name for name in wheel if "/built/" in name} == set(libraries)
    with zipfile.ZipFile(wheel_path) as file:
        for path, name in libraries.items():
            assert file.read(path) == library_path(name).read_bytes()


def test_without_a_compiler_a_wheel_has_the_source_and_fits_every_machine(tmp_path: Path) -> None:
    path, output = build_wheel(tmp_path, has_compiler=False)
    assert path.name.endswith("-py3-none-any.whl")
    assert not any(name.endswith(".so") for name in names_in(path))
    assert "no C++ compiler: this wheel has only the source of the CPU kernels\n" in output


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_says_that_its_packages_are_typed(wheel: set[str], package: str) -> None:
    assert f"{package}/py.typed" in wheel


def test_a_wheel_has_the_demo_model_and_not_what_made_it(wheel: set[str]) -> None:
    found = {name.rpartition("/")[2] for name in wheel if name.startswith("blockyard/demo_model/")}
    assert found == {
        path.name for path in (ROOT / "models" / "demo").iterdir() if path.suffix in (".json", ".safetensors")
    }


def test_a_wheel_has_the_packages_the_page_and_nothing_else(wheel: set[str]) -> None:
    files = {
        str(file.relative_to(ROOT)) for package in PACKAGES for file in (ROOT / package).rglob("*") if file.is_file()
    }
    packaged = {name for name in wheel if not is_made(name)}
    assert packaged == {name for name in files if not re.search(r"__pycache__/|^blockyard_kernels/cpu/built/", name)}


# Refuses every import but of the standard library, grpcio, protobuf and what these two need.
ALONE = """
import importlib.abc, sys
ALLOWED = {"blockyard", "grpc", "google", "typing_extensions"} | set(sys.stdlib_module_names)

class Refuses(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED or name.startswith("google.rpc"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuses())
"""
CALLS = """
import asyncio, blockyard
from blockyard import Client, AsyncClient, BlockyardError, Message
target = sys.argv[1]
with Client(target) as client:
    client.wait_until_ready(10)
    print(client.generate("one two", max_tokens=2).text)
    try:
        client.generate("x", top_k=-1)
    except BlockyardError as error:
        print(error.reason, error.violations[0].field)

async def main():
    async with AsyncClient(target) as client:
        await client.wait_until_ready(10)
        print((await client.chat([Message("user", "three")], max_tokens=1)).text)

asyncio.run(main())
for name in blockyard.__all__:
    if name != "LLM":
        getattr(blockyard, name)
try:
    blockyard.LLM
except ImportError as error:
    print(error)
"""


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with FakeGateway().in_thread() as running:
        yield running


def alone(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program where no other package can be imported."""
    return subprocess.run(
        [sys.executable, "-c", ALONE + program, *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_the_package_says_which_version_it_is() -> None:
    assert blockyard.__version__ == PROJECT["version"]


def test_the_client_needs_nothing_but_grpcio_and_protobuf(gateway: FakeGateway) -> None:
    assert [re.split(r"[<>=]", name)[0] for name in PROJECT["dependencies"]] == ["grpcio", "protobuf"]
    done = alone(CALLS, gateway.target)
    assert done.returncode == 0, done.stderr
    *answers, missing = done.stdout.splitlines()
    assert answers == ["one two", "FIELD_INVALID sampling.top_k", "three"]
    assert re.fullmatch(r"blockyard\.LLM needs .* not installed \(\w+\): pip install 'blockyard\[serve\]'", missing)


def test_the_command_names_the_extra_that_is_missing() -> None:
    done = alone("sys.argv[1:] = ['generate', 'x']\nfrom blockyard.__main__ import main\nmain()")
    assert done.returncode == 1
    assert re.fullmatch(
        r"error: the command line needs a package that is not installed \(typer\): pip install 'blockyard\[cli\]'\n",
        done.stderr,
    )


def test_serve_names_all_that_is_missing_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name in ("torch", "fastapi") else object())
    with pytest.raises(
        extras.MissingPackages, match=r"not installed \(fastapi, torch\): pip install 'blockyard\[serve\]'"
    ):
        extras.require_services("blockyard serve")


@pytest.mark.parametrize("extra", extras.PACKAGES)
def test_the_packages_of_an_extra_are_those_that_it_installs(extra: str) -> None:
    homes = packages_distributions()
    installed = {name.lower().replace("_", "-") for package in extras.PACKAGES[extra] for name in homes[package]}
    declared = [re.split(r"[<>=\[;]", name)[0].lower() for name in PROJECT["optional-dependencies"][extra]]
    assert installed == {name for name in declared if name != "blockyard"}


def test_the_bindings_were_made_by_the_oldest_versions_that_are_allowed() -> None:
    """Older packages would refuse them when they are imported."""
    made = (ROOT / "blockyard" / "inference" / "v1" / "inference_pb2.py").read_text(encoding="utf-8")
    protobuf = re.search(r"# Protobuf Python Version: ([\d.]+)", made)
    served = (ROOT / "blockyard" / "inference" / "v1" / "inference_pb2_grpc.py").read_text(encoding="utf-8")
    grpcio = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)\.\d+'", served)
    assert protobuf
    assert grpcio
    assert PROJECT["dependencies"] == [f"grpcio>={grpcio[1]}", f"protobuf>={protobuf[1]},<8"]
