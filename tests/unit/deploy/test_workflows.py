"""GitHub's files: workflows call targets of the Makefile, with few rights; addresses are those of pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
URLS: dict[str, str] = PROJECT["urls"]
RIGHTS = {
    ("docs", "deploy"): {"pages", "id-token"},
    ("images", "images"): {"packages"},
    ("release", "images"): {"packages"},
    ("release", "publish"): {"id-token"},
    ("release", "announce"): {"contents"},
}
"""The permissions that a job has, by its name."""


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def jobs_of(path: Path) -> dict[str, dict[str, Any]]:
    return read(path)["jobs"]


def steps_of(path: Path) -> Iterator[dict[str, Any]]:
    for job in jobs_of(path).values():
        yield from job.get("steps", [])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_step_is_a_target_of_the_makefile(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    commands = [step["run"] for step in steps_of(path) if "run" in step]
    others = [command for command in commands if not command.startswith("gh release create ")]
    assert {command.removeprefix("make ") for command in others} <= targets


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_job_has_few_rights_and_a_limit_of_time(path: Path) -> None:
    assert read(path)["permissions"] == {"contents": "read"}
    for name, job in jobs_of(path).items():
        writes = {right for right, access in job.get("permissions", {}).items() if access == "write"}
        assert writes == RIGHTS.get((path.stem, name), set())
        assert "uses" in job or job["timeout-minutes"] <= 90
    assert "secrets." not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_a_checkout_keeps_no_token(path: Path) -> None:
    for step in steps_of(path):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", step["uses"])
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_each_python_that_the_package_names_is_tested() -> None:
    named = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert jobs_of(GITHUB / "workflows" / "tests.yml")["test"]["strategy"]["matrix"]["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_one_address_of_the_repository_and_one_of_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.findall(r"^(?:site|repo)_url: (.+)$", site, re.MULTILINE) == [URLS["Documentation"], URLS["Repository"]]
    links = [link["url"] for link in read(GITHUB / "ISSUE_TEMPLATE" / "config.yml")["contact_links"]]
    assert links == [f"{URLS['Repository']}/security/policy", URLS["Documentation"]]
    for name in ("control", "worker"):
        source = f"org.opencontainers.image.source={URLS['Repository']}\n"
        assert source in (ROOT / "docker" / f"{name}.Dockerfile").read_text(encoding="utf-8")
    assert all(url.startswith((URLS["Repository"], URLS["Documentation"])) for url in URLS.values())


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_whole(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= set(form)
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 0
    for field in form["body"]:
        assert field["type"] in ("markdown", "textarea", "input", "dropdown")
        assert field["attributes"]["value" if field["type"] == "markdown" else "label"]


def test_dependabot_reads_what_is_there() -> None:
    updates = read(GITHUB / "dependabot.yml")["updates"]
    assert {update["package-ecosystem"] for update in updates} == {"pip", "github-actions", "docker"}
    assert all((ROOT / update["directory"].lstrip("/")).is_dir() for update in updates)
