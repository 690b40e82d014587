"""Whatever breaks, in any order: each client gets every token and byte of text once, as if nothing had happened."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blockyard.inference.v1 import inference_pb2
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.unit.gateway.harness import Front, ids_of, serving, spec
from tests.unit.gateway.live.test_resume import answer_of, positions_of

TOKEN_IDS = ids_of("wörld 😀 there 日本 was é a cat 🎉 that sat on the mat ü and ate 😀 a rat. ")
NUM_TOKENS = 24


def script(request: Any, index: int, position: int) -> int:
    """Tokens of real text, of which characters have several bytes, from another place for each sequence."""
    return TOKEN_IDS[(7 * index + position) % len(TOKEN_IDS)]


def asked(stop_string: str, *, keep: bool) -> inference_pb2.GenerationSpec:
    return spec(
        request_id="mine",
        n=2,
        max_tokens=NUM_TOKENS,
        return_token_ids=True,
        sampling={"seed": 3},
        stop={"stop_strings": [stop_string] if stop_string else []},
        on_disconnect=inference_pb2.ON_DISCONNECT_KEEP if keep else inference_pb2.ON_DISCONNECT_ABORT,
    )


class Cluster:
    """A scheduler, two gateways that can be replaced, and clients that come back."""

    def __init__(self, scheduler: FakeScheduler) -> None:
        self.scheduler = scheduler
        self.fronts: list[Front] = []
        self._stacks: list[AsyncExitStack] = []

    async def start(self) -> None:
        """Starts the gateways."""
        for _ in range(2):
            stack = AsyncExitStack()
            self.fronts.append(await stack.enter_async_context(serving(self.scheduler)))
            self._stacks.append(stack)

    async def replace(self, number: int) -> None:
        """A gateway dies, and there is a new one."""
        stack = AsyncExitStack()
        front = await stack.enter_async_context(serving(self.scheduler))
        dead, self._stacks[number], self.fronts[number] = self._stacks[number], stack, front
        await dead.aclose()

    async def stop(self) -> None:
        """Stops the gateways."""
        for stack in self._stacks:
            await stack.aclose()


class Client:
    """Reads an answer to its end, at one gateway after the other."""

    def __init__(self, cluster: Cluster, request: inference_pb2.GenerationSpec, number: int) -> None:
        self.events: list[inference_pb2.GenerationEvent] = []
        self._cluster = cluster
        self._request = request
        self._number = number
        self._call: Any = None
        self.done = asyncio.create_task(self._run())

    def cut(self) -> None:
        """Its connection breaks."""
        if self._call is not None:
            self._call.cancel()

    async def _run(self) -> None:
        while not await self._read():
            self._number += 1
            await asyncio.sleep(0)

    async def _read(self) -> bool:
        front = self._cluster.fronts[self._number % 2]
        if self.events:
            positions = positions_of(self.events, with_ids=True)
            self._call = front.resume("mine", positions=positions, spec=self._request)
        else:
            self._call = front.stream(self._request)
        try:
            async for message in self._call:
                self.events.append(message.event)
        except grpc.aio.AioRpcError:
            return False
        except asyncio.CancelledError:
            if not self._call.cancelled():
                raise
            return False
        return True


STEPS = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.tuples(st.just("cut"), st.integers(0, 2)),
    st.tuples(st.just("join"), st.integers(0, 1)),
    st.tuples(st.just("replace"), st.integers(0, 1)),
    st.tuples(st.sampled_from(["restart", "break", "pass"]), st.just(0)),
)


async def play(steps: list[tuple[str, int]], stop_string: str) -> tuple[Any, list[Any]]:
    """Runs the answer undisturbed, and then through all of the steps; returns both."""
    async with FakeScheduler(script=script) as scheduler:
        cluster = Cluster(scheduler)
        await cluster.start()
        expected = answer_of(await cluster.fronts[0].events(asked(stop_string, keep=False)))
        await cluster.replace(0)
        await scheduler.restart()
        scheduler.pause()
        clients = [Client(cluster, asked(stop_string, keep=True), 0)]
        for step, number in steps:
            if step == "step":
                await scheduler.step(number)
            elif step == "cut":
                clients[number % len(clients)].cut()
            elif step == "join" and len(clients) < 3:
                clients.append(Client(cluster, asked(stop_string, keep=True), number))
            elif step == "replace":
                await cluster.replace(number)
            elif step == "restart":
                await scheduler.restart()
            elif step == "break":
                await scheduler.break_streams()
            else:
                await cluster.fronts[0].stub.ListModels(inference_pb2.ListModelsRequest())
        scheduler.go_on()
        async with asyncio.timeout(30):
            await asyncio.gather(*(client.done for client in clients))
        await cluster.stop()
        return expected, [answer_of(client.events) for client in clients]


@given(st.lists(STEPS, max_size=25), st.sampled_from(["", "mat", "日本 w"]))
@example([("step", 3), ("restart", 0), ("step", 4), ("cut", 0), ("replace", 0), ("step", 3)], "mat")
@example([("step", 3), ("join", 1), ("break", 0), ("step", 4), ("restart", 0), ("replace", 1), ("step", 3)], "")
@settings(max_examples=30, deadline=None)
def test_every_client_gets_all_of_it_once(steps: list[tuple[str, int]], stop_string: str) -> None:
    expected, answers = asyncio.run(play(steps, stop_string))
    for texts, token_ids, ends in answers:
        assert (texts, token_ids) == expected[:2]
        told = {index: (end.reason, end.matched_stop, end.usage.num_completion_tokens) for index, end in ends.items()}
        assert told == {
            index: (end.reason, end.matched_stop, end.usage.num_completion_tokens) for index, end in expected[2].items()
        }
