"""No module imports itself through others, not even for a type or inside a function."""

from __future__ import annotations

import ast
from functools import cache
from typing import TYPE_CHECKING

import pytest

from tests.unit.contract.source import PACKAGES, files, parsed

if TYPE_CHECKING:
    from collections.abc import Iterator


def _imported(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    """The modules that a module imports, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            # What is not a module is a name in the package's or the module's own file.
            yield from submodules
            if len(submodules) < len(node.names):
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@cache
def _imports() -> dict[str, set[str]]:
    """What each module imports of ours."""
    names = {path: path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in files()}
    modules = set(names.values())
    return {name: (set(_imported(parsed(path), modules)) & modules) - {name} for path, name in names.items()}


def _reached(start: str) -> set[str]:
    """All modules that importing one loads, itself only when it stands in a circle."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = _imports()[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


@cache
def _in_circles() -> dict[str, set[str]]:
    """The modules that reach themselves, with those of their circle."""
    reached = {name: _reached(name) for name in _imports()}
    return {
        name: {other for other in reached[name] if name in reached[other]} for name in reached if name in reached[name]
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_through_others(package: str) -> None:
    circles = {
        f"{name} -> {other}"
        for name, circle in _in_circles().items()
        for other in _imports()[name] & circle
        if name.partition(".")[0] == package
    }
    assert not circles, "\n".join(["the modules of these imports stand in circles", *sorted(circles)])
