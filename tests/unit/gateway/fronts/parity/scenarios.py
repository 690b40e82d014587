"""What takes more than one call: failures, and requests that are sent again, cancelled and resumed. On each front."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

from blockyard.errors import BlockyardError, Reason
from blockyard.inference.v1 import inference_pb2
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.unit.gateway.fronts.openai.serving import serve_openai
from tests.unit.gateway.fronts.parity import fronts
from tests.unit.gateway.fronts.parity.case import MAX_NUM_SEQS, named
from tests.unit.gateway.fronts.parity.cases import BASES
from tests.unit.gateway.fronts.parity.fronts import FRONTS, of_stream
from tests.unit.gateway.harness import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gateway.text.tokenizer import Tokenizer
    from tests.unit.gateway.fronts.parity.fronts import Front, Outcome

RETRY_SECONDS = 1.5


@dataclass
class Gateway(fronts.Gateway):
    """A gateway on a fake scheduler."""

    scheduler: FakeScheduler


@asynccontextmanager
async def running_gateway(tokenizer: Tokenizer) -> AsyncIterator[Gateway]:
    """A gateway with all of its fronts."""
    async with (
        FakeScheduler(step_seconds=0.0005, max_num_seqs=MAX_NUM_SEQS) as scheduler,
        serving(scheduler, tokenizer=tokenizer) as front,
        serve_openai(front.service) as url,
        httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http,
    ):
        yield Gateway(front.stub, http, scheduler)


def error_of(reason: Reason) -> BlockyardError:
    """What the scheduler tells."""
    return BlockyardError(reason, "so it is", retry_after_seconds=RETRY_SECONDS)


async def refused(gateway: Gateway, front: Front, reason: Reason) -> Outcome:
    """The scheduler does not take the request."""
    request_id = f"refused-{reason}-{front.name}"
    gateway.scheduler.refusals[request_id] = error_of(reason)
    return await gateway.ask(front, named(BASES, request_id).ask(front))


async def failed(gateway: Gateway, reason: Reason) -> dict[Front, Outcome]:
    """Requests fail in the midst, one of each front."""
    async with _held(gateway, f"failed-{reason}") as asking:
        for request_id, _ in asking.values():
            await gateway.scheduler.fail(request_id, error_of(reason))
        return {front: await outcome for front, (_, outcome) in asking.items()}


async def failed_alone(gateway: Gateway, front: Front, indexes: tuple[int, ...]) -> Outcome:
    """Of two sequences these fail by themselves."""
    request_id = f"alone-{len(indexes)}-{front.name}"
    for index in indexes:
        gateway.scheduler.failing[request_id, index] = error_of(Reason.NOT_FINITE)
    return await gateway.ask(front, {**named(BASES, request_id).ask(front), "n": 2})


async def cancelled(gateway: Gateway) -> dict[Front, Outcome]:
    """Somebody cancels them, each over its own wire."""
    async with _held(gateway, "cancelled") as asking:
        for front, (request_id, _) in asking.items():
            if front.wire == "grpc":
                request = inference_pb2.CancelGenerateRequest(request_ids=[request_id])
                assert (await gateway.stub.CancelGenerate(request)).cancelled_request_ids == [request_id]
            else:
                assert (await gateway.http.delete(f"/v1/requests/{request_id}")).json()["cancelled"]
        return {front: await outcome for front, (_, outcome) in asking.items()}


async def left(gateway: Gateway) -> set[str]:
    """Clients leave in the midst; gives the names of the fronts whose requests ended with them."""
    async with _held(gateway, "left") as asking:
        names = {request_id: front.name for front, (request_id, _) in asking.items()}
        for _, outcome in asking.values():
            outcome.cancel()
        await asyncio.wait([outcome for _, outcome in asking.values()])
        scheduler = gateway.scheduler
        await scheduler.wait_until(lambda: names.keys() <= {abort.request_id for abort in scheduler.aborted})
        return {name for request_id, name in names.items() if request_id not in scheduler.live}


@asynccontextmanager
async def _held(gateway: Gateway, name: str) -> AsyncIterator[dict[Front, tuple[str, asyncio.Task[Outcome]]]]:
    """Asks all fronts, and leaves them without an answer within the block."""
    scheduler = gateway.scheduler
    scheduler.pause()
    asking: dict[Front, tuple[str, asyncio.Task[Outcome]]] = {}
    for front in FRONTS:
        request_id = f"{name}-{front.name}"
        asked = named(BASES, request_id).ask(front)
        asking[front] = (request_id, asyncio.create_task(gateway.ask(front, asked)))
    await scheduler.wait_until(lambda: {request_id for request_id, _ in asking.values()} <= scheduler.live.keys())
    yield asking
    scheduler.go_on()


async def sent_again(gateway: Gateway, front: Front) -> tuple[Outcome, Outcome, int]:
    """The same request twice; and how often the scheduler was asked."""
    request_id = f"twice-{front.name}"
    asked = {**named(BASES, request_id).ask(front), "on_disconnect": "keep"}
    first = await gateway.ask(front, asked)
    second = await gateway.ask(front, asked)
    return first, second, _num_added(gateway, request_id)


async def in_conflict(gateway: Gateway, front: Front) -> Outcome:
    """Another request of the same name."""
    request_id = f"conflict-{front.name}"
    asked = named(BASES, request_id).ask(front)
    await gateway.ask(front, asked)
    return await gateway.ask(front, {**asked, "stop.max_tokens": 3})


async def resumed(gateway: Gateway, front: Front) -> tuple[Outcome, Outcome]:
    """An answer, and the same read again from its beginning, over the same wire."""
    request_id = f"resumed-{front.name}"
    asked = {**named(BASES, request_id).ask(front), "on_disconnect": "keep"}
    first = await gateway.ask(front, asked)
    if front.wire == "grpc":
        again = await gateway.resume_grpc(request_id)
    else:
        again = of_stream((await gateway.http.get(f"/v1/requests/{request_id}/stream")).text)
    assert _num_added(gateway, request_id) == 1
    return first, again


def _num_added(gateway: Gateway, request_id: str) -> int:
    return sum(added.request_id == request_id for added in gateway.scheduler.added)
