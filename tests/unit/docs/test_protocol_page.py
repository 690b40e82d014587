"""docs/concepts/protocol.md shows parts of the protocol as a program, as they are."""

from __future__ import annotations

import re

from tests.unit.contract.source import ROOT

FOLDER = ROOT / "tests" / "kit" / "simulation"


def _strip(text: str) -> str:
    return "".join(f"{line.strip()}\n" for line in text.splitlines() if line.strip())


def test_the_parts_are_those_of_the_program() -> None:
    page = (ROOT / "docs" / "concepts" / "protocol.md").read_text(encoding="utf-8")
    parts = [_strip(part) for part in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)]
    program = "".join(_strip((FOLDER / name).read_text(encoding="utf-8")) for name in ("state.py", "spec.py"))
    assert len(parts) > 5
    assert [part for part in parts if part not in program] == []
