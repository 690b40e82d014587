"""docs/concepts/roots.md has each thread, task and process that the source starts, and says what a failure costs."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from typing import NamedTuple

import pytest

from tests.unit.contract.source import ROOT, files, parsed

PAGE = ROOT / "docs/concepts/roots.md"
COMMON = "blockyard.service.roots"
# What starts a root: where it comes from when it is called by its bare name, and the page's word for it. As a method,
# such as that of a TaskGroup, it is known by its name alone.
STARTS = {
    "Thread": ("threading", "thread"),
    "Timer": ("threading", "thread"),
    "make_thread": (COMMON, "thread"),
    "start_task": (COMMON, "task"),
    "create_task": ("asyncio", "task"),
    "ensure_future": ("asyncio", "task"),
    "ThreadPoolExecutor": ("concurrent.futures", "executor"),
    "ProcessPoolExecutor": ("concurrent.futures", "executor"),
    "make_executor": ("blockyard.grammars.threads", "executor"),
    "run_in_executor": ("asyncio", "call"),
    "run_coroutine_threadsafe": ("asyncio", "call"),
    "ThreadingHTTPServer": ("http.server", "server"),
    "Popen": ("subprocess", "process"),
    "create_subprocess_exec": ("asyncio", "process"),
    "create_subprocess_shell": ("asyncio", "process"),
}
# Of modules whose other functions start nothing.
RUNS = {"subprocess": "process", "asyncio": "loop"}
_ROW = re.compile(r"\| (\w+)(?: ×(\d+))? \| `([^`]+)` `([^`]+)` \| [^|]+ \| \*\*([a-z ]+)\*\*[^|]* \|")
COSTS = {"ends the process", "waited for", "by itself"}
# Where a failure may cost less than the process, and nobody waits for it.
MAY_FAIL = re.compile(r"blockyard/(client|local|tracing)/|blockyard/service/(health|metrics_server)\.py")


class Found(NamedTuple):
    """A root in the source. `is_common`: it is started by the common functions."""

    kind: str
    path: str
    scope: str
    is_common: bool


def _find(path: str, tree: ast.Module) -> list[Found]:
    imported = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def kind_of(called: ast.expr) -> tuple[str, bool] | None:
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        if name == "run" and isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            return (kind, False) if (kind := RUNS.get(called.value.id)) else None
        if name not in STARTS or (isinstance(called, ast.Name) and imported.get(name) != STARTS[name][0]):
            return None
        return STARTS[name][1], STARTS[name][0] == COMMON

    found: list[Found] = []

    def visit(node: ast.AST, scope: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inner, started = scope, list[ast.expr]()
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*scope, child.name)
                started += child.bases if isinstance(child, ast.ClassDef) else []
            elif isinstance(child, ast.Call):
                started.append(child.func)
            for kind in filter(None, map(kind_of, started)):
                found.append(Found(kind[0], path, ".".join(inner) or "<module>", kind[1]))
            visit(child, inner)

    visit(tree, ())
    return found


@cache
def roots() -> list[Found]:
    """Those of all packages but the benchmarks'."""
    # Most files name none of them, and are not parsed.
    named = re.compile(rf"\b({'|'.join([*STARTS, *(f'{module}.run' for module in RUNS)])})\b")
    paths = [
        path for path, file in files().items() if not path.startswith("benchmarks/") and named.search(file.read_text())
    ]
    return [found for path in paths for found in _find(path, parsed(path))]


def rows() -> dict[tuple[str, str, str], list[tuple[int, str]]]:
    """The page's rows by kind, file and scope: how many roots each is of, and what their failure costs."""
    found: dict[tuple[str, str, str], list[tuple[int, str]]] = {}
    for kind, number, path, scope, cost in _ROW.findall(PAGE.read_text(encoding="utf-8")):
        found.setdefault((kind, path, scope), []).append((int(number or 1), cost))
    return found


def test_each_root_has_its_row() -> None:
    in_source = Counter((found.kind, found.path, found.scope) for found in roots())
    on_page = {key: sum(number for number, _ in several) for key, several in rows().items()}
    assert on_page == dict(in_source)


def test_all_rows_are_read() -> None:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    num_heads = sum(line.startswith(("| root ", "|--")) for line in lines)
    assert len(lines) - num_heads == sum(map(len, rows().values()))
    assert {cost for several in rows().values() for _, cost in several} <= COSTS


def test_what_nobody_waits_for_is_started_by_the_common_functions() -> None:
    common = {found[:3] for found in roots() if found.is_common}
    for key, several in rows().items():
        kind, path, _ = key
        for _, cost in several:
            if kind != "loop" and not path.endswith("service/roots.py"):
                assert (cost == "ends the process") == (key in common), key
            assert cost != "by itself" or MAY_FAIL.match(path), key


@pytest.mark.parametrize("package", ["gateway", "scheduler_service", "worker_service"])
def test_services_start_no_thread_of_their_own_and_fork_nothing(package: str) -> None:
    own = [found for found in roots() if found.path.startswith(f"{package}/")]
    assert not [found for found in own if found.kind == "thread" and not found.is_common]
    paths = [path for path in files() if path.startswith(f"{package}/")]
    assert not [path for path in paths if re.search(r"\bmultiprocessing\b|\bos\.fork\(", files()[path].read_text())]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import threading\ndef f(): threading.Thread(target=f)", ("thread", "f", False)),
        ("from threading import Thread\nclass A:\n  def f(self): Thread(target=f)", ("thread", "A.f", False)),
        ("from blockyard.service.roots import start_task\nstart_task(f(), 'a')", ("task", "<module>", True)),
        ("async def f(group): group.create_task(f())", ("task", "f", False)),
        ("import subprocess\ndef f(): subprocess.run([])", ("process", "f", False)),
        ("from http.server import ThreadingHTTPServer\nclass A(ThreadingHTTPServer): pass", ("server", "A", False)),
        ("def Thread(): pass\ndef f(): Thread()", None),
        ("def f(loop): loop.run()", None),
    ],
)
def test_roots_are_found(source: str, expected: tuple[str, str, bool] | None) -> None:
    found = [(each.kind, each.scope, each.is_common) for each in _find("a.py", ast.parse(source))]
    assert found == ([expected] if expected else [])
