"""Everything is asked once, before the tests look at what came of it."""

from __future__ import annotations

import ast
import asyncio
import inspect
import math
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import pytest

from blockyard.contract.codec import chat as chat_codec
from blockyard.errors import Reason, Violation
from blockyard.gateway.v1 import state_pb2
from gateway import chat, validation
from gateway.codec import public as codec
from gateway.text import chat_template
from gateway.text.tokenizer_files import load_tokenizer
from tests.kit.demo_tokens import write_demo_with
from tests.unit.gateway.fronts.parity import scenarios
from tests.unit.gateway.fronts.parity.case import TEMPLATE, named
from tests.unit.gateway.fronts.parity.cases import BASES, cases_of
from tests.unit.gateway.fronts.parity.fronts import FRONTS, Front, Outcome
from tests.unit.gateway.fronts.parity.scenarios import Gateway, running_gateway

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

    from blockyard.contract.scheduling import Submission

# Where the rules of requests are.
MODULES = (validation, chat, chat_template, codec, chat_codec)


class Site(NamedTuple):
    """A place in the code that tells of a violation."""

    module: str
    function: str
    line: int


class Ran(NamedTuple):
    """What came of a case on a front; `added`: what the scheduler was asked, without names and handles."""

    outcome: Outcome
    added: tuple[Submission, state_pb2.RequestState] | None


@dataclass
class Results:
    """All that was asked on all fronts."""

    ran: dict[tuple[str, Front], Ran] = field(default_factory=dict[tuple[str, Front], Ran])
    refused: dict[tuple[Reason, Front], Outcome] = field(default_factory=dict[tuple[Reason, Front], Outcome])
    failed: dict[Reason, dict[Front, Outcome]] = field(default_factory=dict[Reason, dict[Front, Outcome]])
    cancelled: dict[Front, Outcome] = field(default_factory=dict[Front, Outcome])
    left: set[str] = field(default_factory=set[str])
    in_conflict: dict[Front, Outcome] = field(default_factory=dict[Front, Outcome])
    failed_alone: dict[tuple[tuple[int, ...], Front], Outcome] = field(default_factory=dict)
    sent_again: dict[Front, tuple[Outcome, Outcome, int]] = field(
        default_factory=dict[Front, tuple[Outcome, Outcome, int]]
    )
    resumed: dict[Front, tuple[Outcome, Outcome]] = field(default_factory=dict[Front, tuple[Outcome, Outcome]])
    # The sites that told something, and what they told of.
    told: set[tuple[Site, str]] = field(default_factory=set[tuple[Site, str]])

    async def ask_all(self, gateway: Gateway, front: Front) -> None:
        """Asks one front everything that takes one call, or two in a row."""
        for number, case in enumerate((BASES, *cases_of(front))):
            request_id = f"case-{number}-{front.name}"
            outcome = await gateway.ask(front, named(case, request_id).ask(front))
            added = [nameless(each) for each in gateway.scheduler.added if each.request_id == request_id]
            assert len(added) <= 1
            self.ran[case.name, front] = Ran(outcome, added[0] if added else None)
        for reason in Reason:
            self.refused[reason, front] = await scenarios.refused(gateway, front, reason)
        for indexes in ((1,), (0, 1)):
            self.failed_alone[indexes, front] = await scenarios.failed_alone(gateway, front, indexes)
        self.sent_again[front] = await scenarios.sent_again(gateway, front)
        self.in_conflict[front] = await scenarios.in_conflict(gateway, front)
        self.resumed[front] = await scenarios.resumed(gateway, front)


def nameless(added: Submission) -> tuple[Submission, state_pb2.RequestState]:
    """What a request asks of the scheduler and of other gateways, whoever sent it and when."""
    state = state_pb2.RequestState.FromString(added.gateway_state)
    state.spec.ClearField("request_id")
    state.ClearField("front_state")
    queueing = None if added.max_queue_seconds is None else math.ceil(added.max_queue_seconds)
    asked = replace(added, max_queue_seconds=queueing, request_id="", digest=b"", gateway_state=b"", trace_context=None)
    return asked, state


async def run_all(results: Results, template: Path) -> None:
    """Asks everything."""
    # Codestral's tokens, so that there is a suffix to ask for.
    folder = write_demo_with(template.with_name("model"), ("[SUFFIX]", "[PREFIX]"))
    async with running_gateway(load_tokenizer(folder, chat_template_file=template)) as gateway:
        await asyncio.gather(*(results.ask_all(gateway, front) for front in FRONTS))
        results.cancelled = await scenarios.cancelled(gateway)
        results.left = await scenarios.left(gateway)
        for reason in Reason:
            results.failed[reason] = await scenarios.failed(gateway, reason)


def sites_of(module: ModuleType) -> dict[Site, ast.Call]:
    """The places in a module that make a Violation."""
    found: dict[Site, ast.Call] = {}
    for function in ast.walk(ast.parse(inspect.getsource(module))):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Violation":
                found[Site(module.__name__, function.name, node.lineno)] = node
    return found


def _watch(module: ModuleType, told: set[tuple[Site, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes note of every violation that a module tells."""

    def violation(name: str, description: str, reason: Reason = Reason.FIELD_INVALID) -> Violation:
        caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        code = caller.f_code
        told.add((Site(module.__name__, code.co_name, caller.f_lineno), name))
        return Violation(name, description, reason)

    monkeypatch.setattr(module, "Violation", violation)


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    """What came of everything, on every front."""
    results = Results()
    template = tmp_path_factory.mktemp("parity") / "chat_template.jinja"
    template.write_text(TEMPLATE)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in MODULES:
            _watch(module, results.told, monkeypatch)
        asyncio.run(run_all(results, template))
    yield results
