"""The Dockerfiles: what they copy exists and gets into the build, and holds all that its services import."""

from __future__ import annotations

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import pytest

from blockyard.settings import settings_of
from blockyard_kernels.cpu.build import built_folder
from tests.unit.deploy.services import CONFIGURATIONS

ROOT = Path(__file__).parents[3]
DOCKERFILES = {"control": ("gateway", "scheduler_service"), "worker": ("worker_service",)}
OURS = {"blockyard", "gateway", "scheduler_service", "worker_service", "blockyard_kernels"}


def text_of(name: str) -> str:
    return (ROOT / "docker" / f"{name}.Dockerfile").read_text()


def stage_of(name: str, stage: str) -> str:
    """One stage's part of a file; the last one's is ""."""
    stages = re.split(r"^(?=FROM )", text_of(name), flags=re.MULTILINE)[1:]
    (found,) = [text for text in stages if stage == (re.findall(r"^FROM \S+ AS (\w+)\n", text) or [""])[0]]
    return found


def copied(name: str) -> list[str]:
    lines = re.findall(r"^COPY ((?!--from).+) \S+$", text_of(name), re.MULTILINE)
    return [source for line in lines for source in line.split()]


def is_ignored(path: str) -> bool:
    """Whether .dockerignore keeps a file out: the last of its lines that fits the file or a folder above it decides."""
    ignored = False
    parts = [str(part) for part in (PurePosixPath(path), *PurePosixPath(path).parents) if str(part) != "."]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        if line and not line.startswith("#"):
            names = [PurePosixPath(part).name for part in parts] if "**/" in line else parts
            if any(fnmatch(name, pattern) for name in names):
                ignored = not line.startswith("!")
    return ignored


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_is_copied_exists_and_is_not_ignored(name: str) -> None:
    for source in copied(name):
        files = [path for found in ROOT.glob(source) for path in (found, *found.rglob("*")) if path.is_file()]
        seen = [path for path in files if not is_ignored(path.relative_to(ROOT).as_posix())]
        assert seen, source
        assert not [path for path in seen if "__pycache__" in path.parts], source


def test_what_is_made_on_this_machine_stays_out() -> None:
    library = (built_folder() / "avx2.so").relative_to(ROOT).as_posix()
    for path in (library, ".venv/bin/python", "blockyard/__pycache__/rpc.cpython-311.pyc", ".git/HEAD", "tests/a.py"):
        assert is_ignored(path), path
    assert not is_ignored("blockyard_kernels/cpu/csrc/library.cpp")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_holds_every_package_that_its_services_import(name: str) -> None:
    packages = OURS.intersection(copied(name))
    assert set(DOCKERFILES[name]) <= packages
    for package in packages:
        for file in (ROOT / package).rglob("*.py"):
            imports = re.findall(r"^\s*(?:from|import) (\w+)", file.read_text(), re.MULTILINE)
            assert OURS.intersection(imports) <= packages, file


@pytest.mark.parametrize("name", DOCKERFILES)
def test_runs_as_nobody_on_a_base_that_can_be_chosen(name: str) -> None:
    text = text_of(name)
    assert "ARG BASE_IMAGE=python:3.12-slim\n" in text
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE))
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) - stages == {"${BASE_IMAGE}"}
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE) == ["65532:65532"]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_installs_extras_that_exist(name: str) -> None:
    (extras,) = re.findall(r"'\.\[(.+)\]'", text_of(name))
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_every_builder_takes_it(name: str) -> None:
    assert not re.search(r"^(# syntax=|RUN --mount|COPY --(link|chmod|parents)|ADD )|<<", text_of(name), re.MULTILINE)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_builds_stays_in_stages_of_its_own(name: str) -> None:
    last = stage_of(name, "")
    assert not re.search(r"\bpip\b|apt-get|PIP_|TORCH_INDEX_URL|^ARG", last, re.MULTILINE)
    assert "pip uninstall --yes" in stage_of(name, "environment")


@pytest.mark.parametrize(("triton", "headers"), [(False, False), (True, True), (True, False)])
def test_a_compiler_is_there_where_triton_is(tmp_path: Path, triton: bool, headers: bool) -> None:
    """And the headers of Python that it needs, once; without Triton nothing is installed."""
    site = tmp_path / "venv/lib/python3.12/site-packages"
    (site / "triton" if triton else site).mkdir(parents=True)
    tools, include, log = tmp_path / "tools", tmp_path / "include", tmp_path / "log"
    tools.mkdir()
    include.mkdir()
    if headers:
        (include / "Python.h").touch()
    for path, text in (
        (tools / "apt-get", f'echo "$@" >> {log}'),
        (tools / "gcc", f'test "$1" = -I{include} && cat >> {log}'),
        (tools / "rm", ""),
        (tmp_path / "venv/bin/python", f"echo {include}"),
    ):
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    (script,) = re.findall(r"^RUN (.+?[^\\])\n", stage_of("worker", "runtime"), re.MULTILINE | re.DOTALL)
    environment = {"PATH": f"{tools}:/usr/bin:/bin"}
    subprocess.run(["sh", "-c", script.replace("/opt", str(tmp_path))], env=environment, check=True)
    packages = "gcc libc6-dev" + ("" if headers else " libpython3-dev")
    expected = ["update", f"install --yes --no-install-recommends {packages}", "#include <Python.h>"]
    assert (log.read_text().splitlines() if log.exists() else []) == (expected if triton else [])
    assert stage_of("worker", "").startswith("FROM runtime\n")


@pytest.mark.parametrize(("name", "service"), [("control", "gateway"), ("worker", "worker")])
def test_says_by_itself_whether_it_is_well(name: str, service: str) -> None:
    module, configuration = CONFIGURATIONS[service]
    last = stage_of(name, "")
    variables = dict(re.findall(r"(BLOCKYARD_\w+)=(\S+)", last))
    known = {setting.variable for one in CONFIGURATIONS.values() for setting in settings_of(one[1])}
    assert set(variables) <= known
    assert f"BLOCKYARD_{service.upper()}_HEALTH_PORT" in {setting.variable for setting in settings_of(configuration)}
    port = variables[f"BLOCKYARD_{service.upper()}_HEALTH_PORT"]
    assert f'CMD ["python", "-m", "blockyard.service.healthcheck", "127.0.0.1:{port}"]' in last
    assert last.rstrip().endswith(f'CMD ["python", "-m", "{module}"]')


def test_the_control_plane_has_no_torch() -> None:
    assert "torch" not in text_of("control").replace("no torch", "")
    assert "TORCH_INDEX_URL" in text_of("worker")
