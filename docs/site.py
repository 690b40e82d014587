"""What mkdocs does with these pages beside showing them: their order, and links that leave the folder.

mkdocs.yml names this file as a hook. The pages link as the repository has them, so that they work there too.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
LINK = re.compile(r"(\]\()([^)\s]+)(?=\))")
SECTIONS = {"Guides": "guides", "Concepts": "concepts", "Reliability": "reliability", "Reference": "reference"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Orders the pages of each folder as the index first names them, and decisions by their numbers."""
    named = [target for _, target in LINK.findall((DOCS / "README.md").read_text(encoding="utf-8"))]
    nav: list[Any] = [{"Overview": "README.md"}]
    for title, folder in SECTIONS.items():
        nav.append({title: list(dict.fromkeys(name for name in named if re.fullmatch(rf"{folder}/[\w-]+\.md", name)))})
    nav.append({"Decisions": list(_decisions())})
    config.nav = nav
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Turns links to folders and to files outside docs/ into the repository's addresses."""
    here = (DOCS / page.file.src_uri).parent

    def replace(match: re.Match[str]) -> str:
        path, mark, anchor = match[2].partition("#")
        if not path or "://" in path:
            return match[0]
        target = (here / path).resolve()
        if target == DOCS / "adr":
            return match[1] + os.path.relpath(DOCS / next(_decisions()), here)
        if target.is_relative_to(DOCS) and not target.is_dir():
            return match[0]
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {path}, which does not exist")
        kind = "tree" if target.is_dir() else "blob"
        return f"{match[1]}{config.repo_url}/{kind}/main/{target.relative_to(DOCS.parent).as_posix()}{mark}{anchor}"

    return LINK.sub(replace, markdown)


def _decisions() -> Iterator[str]:
    return (f"adr/{path.name}" for path in sorted((DOCS / "adr").glob("*.md")))
