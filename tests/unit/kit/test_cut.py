"""What `make test` leaves out is there, and some case of each group stays."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit.cut import CASES, cut
from tests.unit.docs.commands import ROOT

PATH, FUNCTION = "tests/kernels/test_families.py", "test_two_ranks_give_the_bits_of_one"


@pytest.mark.parametrize("path", CASES)
def test_every_function_of_the_list_exists(path: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert CASES[path].keys() <= functions


def kept_of(*args: str) -> list[str]:
    """The cases that stay of six of a function that keeps one of two, and of one that is not listed."""
    names = [*(f"{PATH}::{FUNCTION}[{number}]" for number in range(6)), f"{PATH}::test_other"]
    items: Any = [SimpleNamespace(nodeid=name) for name in names]
    config: Any = SimpleNamespace(args=args, hook=SimpleNamespace(pytest_deselected=lambda items: None))
    cut(config, items)
    return [item.nodeid.removeprefix(f"{PATH}::").removeprefix(FUNCTION) for item in items]


def test_one_of_each_group_stays_at_another_place_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLOCKYARD_TEST_WHOLE", raising=False)
    monkeypatch.setitem(CASES[PATH], FUNCTION, 2)
    assert kept_of("tests/kernels") == ["[0]", "[3]", "[4]", "test_other"]


def test_named_tests_and_the_whole_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLOCKYARD_TEST_WHOLE", raising=False)
    assert len(kept_of(f"{PATH}::{FUNCTION}")) == 7
    monkeypatch.setenv("BLOCKYARD_TEST_WHOLE", "1")
    assert len(kept_of("tests/kernels")) == 7
