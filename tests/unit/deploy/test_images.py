"""The Dockerfiles: what they copy exists and gets into the build, and holds all that its services import."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCKERFILES = {"control": ("gateway", "scheduler_service"), "worker": ("worker_service",)}
OURS = {"blockyard", "gateway", "scheduler_service", "worker_service", "kernels"}


def text_of(name: str) -> str:
    return (ROOT / "docker" / f"{name}.Dockerfile").read_text()


def copied(name: str) -> list[str]:
    lines = re.findall(r"^COPY ((?!--from).+) \S+$", text_of(name), re.MULTILINE)
    return [source for line in lines for source in line.split()]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_is_copied_exists_and_is_not_ignored(name: str) -> None:
    ignore = (ROOT / "docker" / f"{name}.Dockerfile.dockerignore").read_text().split()
    assert ignore[0] == "*"
    for source in copied(name):
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignore


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
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE_IMAGE}"}
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE) == ["65532:65532"]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_installs_extras_that_exist(name: str) -> None:
    (extras,) = re.findall(r"'\.\[(.+)\]'", text_of(name))
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known)


def test_the_control_plane_has_no_torch() -> None:
    assert "torch" not in text_of("control").replace("no torch", "")
    assert "TORCH_INDEX_URL" in text_of("worker")
