"""The pages that are made from the code are current, and every link between pages leads somewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from blockyard.errors import Reason

ROOT = Path(__file__).parents[3]
GENERATE: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "reference" / "generate.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("name", GENERATE["PAGES"])
def test_a_generated_page_is_current(name: str) -> None:
    made = GENERATE["PAGES"][name]()
    committed = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert committed == made, "run: python docs/reference/generate.py"


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
