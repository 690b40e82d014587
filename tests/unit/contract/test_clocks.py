"""Services and client take time, chance and gRPC's core from `blockyard.clock` and `blockyard.transport`.

A run can be repeated where these are replaced. What asks the system itself stands here, with why that changes no
decision.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache

from tests.unit.contract.source import files, parsed

# Everything that a gateway, a scheduler, a worker or a client runs. Programs for a terminal and kernels are not.
SCANNED = re.compile(
    r"(gateway|scheduler_service|worker_service)/|blockyard/((client|contract|security|service|tracing)/|\w+\.py)"
)
OWNERS = ("blockyard/clock.py", "blockyard/transport.py")
CLOCKS = {f"{name}{unit}" for name in ("monotonic", "perf_counter", "time", "thread_time") for unit in ("", "_ns")}
NAMES = {
    "time": CLOCKS | {"process_time", "localtime", "gmtime", "strftime", "ctime"},
    "datetime": {"now", "utcnow", "today"},
    "os": {"urandom", "getrandom"},
    "grpc.aio": {"server", "insecure_channel", "secure_channel"},
}
# Of these modules everything, except what draws nothing.
RANDOM = {"random": {"Random"}, "secrets": {"compare_digest"}, "uuid": {"UUID"}}

LOADING = "how long a load took, which is logged"
PROFILING = "measures a step's parts for a profile, on the clock of torch's own"
KERNELS = "measures the device; what runs instead of a device brings its own times"
GROUPS = "the deadline of collectives, which wait for other processes in threads"
METRICS = "a sample's time in /metrics"
READS = {
    "blockyard/security/keys.py make_secret": "`blockyard keys` makes a key",
    "blockyard/service/metrics.py Histogram.observe": METRICS,
    "blockyard/tracing/export.py _nanoseconds": "a span's time; a run that is repeated is not traced",
    "gateway/grammars/compiling/compilers.py Checks._num_seconds_left": "processor time, which no clock replaces",
    "gateway/grammars/compiling/compiler_process.py *": "another process",
    "gateway/observe/vllm_metrics.py add_vllm_names": METRICS,
    "gateway/text/chat_template.py *": "the date, for templates that write it into a prompt",
    "worker_service/collectives/group.py *": GROUPS,
    "worker_service/collectives/process_group.py *": GROUPS,
    "worker_service/groups/rendezvous.py RendezvousStore.*": GROUPS,
    "worker_service/models/*": LOADING,
    "worker_service/observe/*": PROFILING,
    "worker_service/operations/diagnostics.py *": KERNELS,
    "worker_service/runner/*": KERNELS,
    "worker_service/weights/saving.py *": "the name of a file that is not whole yet, and how long a save took",
}


@cache
def found() -> dict[str, set[str]]:
    """The places that ask the system, `file scope`, and the names by which they do."""
    places: dict[str, set[str]] = defaultdict(set)
    # Most files name none of them, and are not parsed.
    named = re.compile(rf"import ({'|'.join(NAMES.keys() | RANDOM)})\b|from ({'|'.join(NAMES.keys() | RANDOM)}) import")
    for path, file in files().items():
        if SCANNED.match(path) and path not in OWNERS and named.search(file.read_text()):
            for scope, name in _find(parsed(path)):
                places[f"{path} {scope}"].add(name)
    return places


def _find(tree: ast.Module) -> list[tuple[str, str]]:
    modules = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    # A class whose methods ask: `from datetime import datetime`.
    modules |= {
        alias.asname or alias.name: node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "datetime"
        for alias in node.names
    }
    names: list[tuple[str, str]] = []

    def visit(node: ast.AST, scope: tuple[str, ...]) -> None:
        place = ".".join(scope) or "<module>"
        if isinstance(node, ast.ImportFrom):
            names.extend((place, alias.name) for alias in node.names if _asks(node.module or "", alias.name))
        elif isinstance(node, ast.Attribute) and _asks(modules.get(ast.unparse(node.value), ""), node.attr):
            names.append((place, ast.unparse(node)))
        for child in ast.iter_child_nodes(node):
            if isinstance(node, ast.arguments) and child in (*node.defaults, *node.kw_defaults):
                continue  # a clock for callers that give none
            inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            visit(child, (*scope, child.name) if inner else scope)

    visit(tree, ())
    return names


def _asks(module: str, name: str) -> bool:
    return name not in RANDOM[module] if module in RANDOM else name in NAMES.get(module, ())


def _is_listed(place: str, listed: str) -> bool:
    return place.startswith(listed[:-1]) if listed.endswith("*") else place == listed


def test_nothing_else_asks_the_system() -> None:
    unlisted = {place: names for place, names in found().items() if not any(_is_listed(place, each) for each in READS)}
    assert not unlisted


def test_what_is_listed_is_there() -> None:
    places = found()
    assert not [listed for listed in READS if not any(_is_listed(place, listed) for place in places)]


def test_each_way_to_ask_is_seen() -> None:
    source = """
import os, random, secrets, time, uuid
import grpc.aio
import time as clocks
from datetime import datetime
from time import monotonic

def reads(clock=time.monotonic, *, draw=random.random):
    clocks.perf_counter_ns(), time.time
    random.uniform(0, 1), secrets.token_hex(4), uuid.uuid4(), os.urandom(1)
    datetime.now(), grpc.aio.server()

def reads_not():
    random.Random(1), uuid.UUID(int=1), time.sleep(1), datetime.fromtimestamp(0), secrets.compare_digest(a, b)
"""
    assert [name for _, name in _find(ast.parse(source))] == [
        "monotonic",
        "clocks.perf_counter_ns",
        "time.time",
        "random.uniform",
        "secrets.token_hex",
        "uuid.uuid4",
        "os.urandom",
        "datetime.now",
        "grpc.aio.server",
    ]
