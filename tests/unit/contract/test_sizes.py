"""No file and no function grows past the house's two sizes."""

from __future__ import annotations

import ast
from functools import cache
from typing import TYPE_CHECKING

import pytest

from tests.unit.contract.source import files, parsed

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMITS = {"lines of a file": 400, "lines of a function": 60}


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The functions of a module under their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not isinstance(node, ast.ClassDef):
                yield f"{prefix}{node.name}", node
            yield from _functions(node, f"{prefix}{node.name}.")
        else:
            yield from _functions(node, prefix)


@cache
def _measured() -> dict[tuple[str, str], int]:
    """The size of each file and function by its measure and its name."""
    measured: dict[tuple[str, str], int] = {}
    for path, file in files().items():
        measured["lines of a file", path] = len(file.read_text().splitlines())
        for name, node in _functions(parsed(path)):
            assert node.end_lineno is not None
            measured["lines of a function", f"{path}: {name}"] = node.end_lineno - node.lineno + 1
    return measured


@pytest.mark.parametrize("measure", LIMITS)
def test_nothing_is_larger_than_the_house_allows(measure: str) -> None:
    larger = {name: size for (what, name), size in _measured().items() if what == measure and size > LIMITS[measure]}
    assert not larger, f"more than {LIMITS[measure]} {measure}: split it by its responsibilities"
