"""docs/site.py: every page has its place, and links that leave the folder become the repository's addresses."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
REPOSITORY = "https://example.org/repository"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", DOCS / "site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SITE: Any = load()


def shown(markdown: str, page: str = "guides/run.md") -> str:
    """What the site's reader of Markdown gets for a page's text."""
    file = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    return SITE.on_page_markdown(markdown, file, SimpleNamespace(repo_url=REPOSITORY))


def test_every_page_has_one_place() -> None:
    config = SITE.on_config(SimpleNamespace(nav=None))
    pages = [
        page
        for section in config.nav
        for each in section.values()
        for page in ([each] if isinstance(each, str) else each)
    ]
    assert sorted(pages) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    assert [next(iter(section)) for section in config.nav] == [
        "Overview",
        "Guides",
        "Concepts",
        "Reliability",
        "Reference",
        "Decisions",
    ]


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("call.md#streams", "call.md#streams"),
        ("#models", "#models"),
        ("https://vllm.ai", "https://vllm.ai"),
        ("../images/page.png", "../images/page.png"),
        ("../../CHANGELOG.md", f"{REPOSITORY}/blob/main/CHANGELOG.md"),
        ("../../protos/", f"{REPOSITORY}/tree/main/protos"),
        ("../../README.md#use-it", f"{REPOSITORY}/blob/main/README.md#use-it"),
        ("../adr/", "../adr/0001-three-services-and-a-contract.md"),
    ],
)
def test_only_links_that_leave_the_folder_change(link: str, expected: str) -> None:
    assert shown(f"See [it]({link}) and [more]({link}).") == f"See [it]({expected}) and [more]({expected})."


def test_a_link_to_nothing_is_refused() -> None:
    with pytest.raises(FileNotFoundError, match=r"guides/run\.md links to \.\./\.\./gone\.py, which does not exist"):
        shown("[it](../../gone.py)")
