"""Paths that nobody means well with, and the traps in a folder that some of them lead into."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from blockyard.errors import Reason

if TYPE_CHECKING:
    from pathlib import Path

# Refused by what they are: nobody looks at a file for them.
ALWAYS = {
    "NUL": "a\0b",
    "300 characters": "x" * 300,
    "100,000 parts": "a/" * 100_000,
    "100,000 parts upwards": "../" * 100_000,
    "100 kB": "x" * 100_000,
}
# Refused by where they lead, below a root with traps.
BELOW = {
    "a link to itself": "loop",
    "below a link to itself": "loop/inside",
    "a link out of the root": "outside",
    "upwards": "../elsewhere",
    "absolute": "/etc",
    "the home of nobody": "~nobody-of-this-name/x",
    "a named pipe": "pipe",
}
PATHS = {"empty": "", **ALWAYS, **BELOW}
# What such a path may be refused with.
TYPED = (Reason.FIELD_INVALID, Reason.PERMISSION_DENIED, Reason.MODEL_NOT_LOADED)


def lay_traps(root: Path) -> None:
    """Puts into a folder what the paths of BELOW lead to; beside it is a folder "elsewhere"."""
    root.mkdir(parents=True, exist_ok=True)
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    (root / "loop").symlink_to("loop")
    (root / "outside").symlink_to(elsewhere)
    os.mkfifo(root / "pipe")
