"""The pages that are made from the code are current, and every link between pages leads somewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import typer.main

from blockyard.cli.main import app
from blockyard.configuration import CHOSEN_TOGETHER, SystemConfiguration
from blockyard.errors import Reason
from blockyard.settings import make_parser, settings_of
from gateway.config import GatewayConfiguration
from scheduler_service.config import SchedulerConfiguration
from worker_service.config import WorkerConfiguration

ROOT = Path(__file__).parents[3]
GENERATE: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "reference" / "generate.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests" / "kit" / "README.md"])


# What is read for the page of messages is read once, where the other tests of it are: test_messages_page.py.
@pytest.mark.parametrize("name", [name for name in GENERATE["PAGES"] if name != "messages.md"])
def test_a_generated_page_is_current(name: str) -> None:
    made = GENERATE["PAGES"][name]()
    committed = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert committed == made, "run: python docs/reference/generate.py"


SERVICES = {"Gateway": GatewayConfiguration, "Scheduler": SchedulerConfiguration, "Worker": WorkerConfiguration}


def promised() -> dict[str, set[str]]:
    """The settings that the page lists, by the heading of their table."""
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)
    return {
        title: {flag.replace("-", "_") for flag in re.findall(r"^\| `--([a-z-]+)`<br>", text, re.MULTILINE)}
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }


@pytest.mark.parametrize("title", SERVICES)
def test_a_service_takes_every_setting_that_the_page_promises(title: str) -> None:
    parser = make_parser(SERVICES[title], title, "")
    taken = {action.dest for action in parser._actions} - {"help", "config", "print_config"}
    assert promised()[title] == taken


def test_the_services_together_take_every_setting_that_the_page_promises() -> None:
    page = promised()
    together = set().union(*page.values()) - set(CHOSEN_TOGETHER)
    assert together == {setting.name for setting in settings_of(SystemConfiguration)}
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    flags = {flag for option in command.params for flag in option.opts if flag.startswith("--")}
    assert {f"--{name.replace('_', '-')}" for name in together} <= flags
    assert set(CHOSEN_TOGETHER) <= set().union(*(page[title] for title in SERVICES))


def test_every_reason_is_explained() -> None:
    assert set(GENERATE["MEANINGS"]) == set(Reason)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?:|#|mailto:", target):
            assert (page.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_functions_that_are_named_exist(page: Path) -> None:
    """`path/to/file.py` and `path/to/file.py::name` in a page stand for what is there."""
    for path, name in re.findall(r"`([\w]+/[\w/]+\.py)(?:::([\w.]+))?`", page.read_text(encoding="utf-8")):
        file = ROOT / path
        assert file.is_file(), path
        if name:
            last = name.rpartition(".")[2]
            assert re.search(rf"\b(def|class) {last}\b", file.read_text(encoding="utf-8")), f"{path}::{name}"
