"""Calls the commands in this process."""

from __future__ import annotations

import pytest

from blockyard.cli.main import main


def run(*arguments: str) -> int:
    """Calls the program, and returns its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)
