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
from blockyard.extras import PACKAGES
from tests.kit.fakes.fake_gateway import FakeGateway
from tests.kit.processes.wheel import build_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of the files in a wheel of this source; setuptools takes some seconds for it."""
    with zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("wheel"))) as file:
        return set(file.namelist())


def test_a_wheel_has_the_kernels_sources_and_no_build_of_them(wheel: set[str]) -> None:
    sources = {f"kernels/cpu/csrc/{path.name}" for path in (ROOT / "kernels" / "cpu" / "csrc").iterdir()}
    assert {name for name in wheel if "/csrc/" in name} == sources
    assert not any(name.endswith(".so") for name in wheel)


def test_a_wheel_has_the_demo_model_and_not_what_made_it(wheel: set[str]) -> None:
    found = {name.rpartition("/")[2] for name in wheel if name.startswith("blockyard/demo_model/")}
    assert found == {
        path.name for path in (ROOT / "models" / "demo").iterdir() if path.suffix in (".json", ".safetensors")
    }


def test_a_wheel_has_the_packages_the_page_and_nothing_else(wheel: set[str]) -> None:
    packages = ("blockyard", "gateway", "scheduler_service", "worker_service", "kernels")
    files = {
        str(file.relative_to(ROOT)) for package in packages for file in (ROOT / package).rglob("*") if file.is_file()
    }
    made = {name for name in wheel if not re.match(r"blockyard/demo_model/|blockyard-[\d.]+\.dist-info/", name)}
    assert made == {name for name in files if not re.search(r"__pycache__/|^kernels/cpu/built/", name)}


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
    from blockyard import extras

    monkeypatch.setattr(extras, "find_spec", lambda name: None if name in ("torch", "fastapi") else object())
    with pytest.raises(
        extras.MissingPackages, match=r"not installed \(fastapi, torch\): pip install 'blockyard\[serve\]'"
    ):
        extras.require_services("blockyard serve")


@pytest.mark.parametrize("extra", PACKAGES)
def test_the_packages_of_an_extra_are_those_that_it_installs(extra: str) -> None:
    homes = packages_distributions()
    installed = {name.lower().replace("_", "-") for package in PACKAGES[extra] for name in homes[package]}
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
