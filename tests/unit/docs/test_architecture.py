"""docs/concepts/architecture.md lists every folder of the source, and none that is not there."""

from __future__ import annotations

import re

from tests.unit.contract.source import ROOT, files


def test_the_list_of_folders_is_that_of_the_tree() -> None:
    page = (ROOT / "docs" / "concepts" / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([a-z_/]+)/` \|", page, re.MULTILINE)
    source = [path for path in files() if not path.startswith("benchmarks/")]
    # A folder of nothing but an `__init__` holds generated code.
    there = {path.rpartition("/")[0] for path in source if not path.endswith("/__init__.py")}
    assert sorted(listed) == sorted(there)
