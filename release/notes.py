"""Writes a release's notes, which are its part of CHANGELOG.md: python release/notes.py TAG

It refuses a tag that is not the version in pyproject.toml, or that CHANGELOG.md has no part for.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes_of(tag: str, root: Path = ROOT) -> str:
    """Returns a version's part of the changelog, without its title.

    Raises:
        ValueError: the tag, the package and the changelog do not name one version.
    """
    version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag!r}, and pyproject.toml has version {version}: it should be 'v{version}'")
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n+(.*?)(?=^## |\Z)", changes, re.M | re.S)
    if found is None or not found[1].strip():
        raise ValueError(f"CHANGELOG.md has no part '## [{version}] - <year-month-day>'")
    return found[1].strip() + "\n"


def main() -> None:
    try:
        sys.stdout.write(notes_of(sys.argv[1] if len(sys.argv) > 1 else ""))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
