"""All targets by name."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tests.kit.fuzz.disturbances import fuzz_disturbances
from tests.kit.fuzz.gateway import bases, fuzz_attach_responses, fuzz_public
from tests.kit.fuzz.report import Report
from tests.kit.fuzz.services import fuzz_attach_requests, fuzz_lifecycle, fuzz_operations
from tests.kit.fuzz.steps import fuzz_answers, fuzz_steps

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

TARGETS: dict[str, Callable[[Report], Awaitable[None]]] = {
    "AttachResponse": fuzz_attach_responses,
    "ExecuteModelResponse": fuzz_answers,
    "AttachRequest": fuzz_attach_requests,
    "ExecuteModelRequest": fuzz_steps,
    "lifecycle": fuzz_lifecycle,
    "operations": fuzz_operations,
    "disturbances": fuzz_disturbances,
    **{rpc: partial(fuzz_public, rpc=rpc) for rpc in bases()},
}


async def fuzz(name: str, num_cases: int, seed: int) -> Report:
    """Runs one target; gives its report, which has surprises or has not."""
    report = Report(name, num_cases, seed)
    await TARGETS[name](report)
    return report
