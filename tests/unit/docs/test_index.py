"""docs/README.md leads to every page, and README.md to it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


def linked_from(page: Path) -> set[Path]:
    """The files that a page has links to."""
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    return {(page.parent / target).resolve() for target in targets if "://" not in target}


def test_the_index_leads_to_every_page() -> None:
    pages = {
        page for folder in ("concepts", "guides", "reference", "reliability") for page in (DOCS / folder).glob("*.md")
    }
    assert pages - linked_from(DOCS / "README.md") == set()


def test_readme_leads_to_the_index() -> None:
    assert DOCS / "README.md" in linked_from(ROOT / "README.md")
