"""The source files that are written by hand, and what stands in them."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("blockyard", "gateway", "scheduler_service", "worker_service", "blockyard_kernels", "benchmarks")
# Bindings: blockyard/gateway/v1, blockyard/google_rpc/google.
_GENERATED = re.compile(r"/(v\d+|google)/")


@cache
def files() -> dict[str, Path]:
    """The source files by their path from the repository's root, with `/` in it."""
    found = (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py")))
    paths = {file.relative_to(ROOT).as_posix(): file for file in found}
    return {path: file for path, file in paths.items() if not _GENERATED.search(path)}


@cache
def parsed(path: str) -> ast.Module:
    """The syntax tree of one of `files()`."""
    return ast.parse(files()[path].read_text())
