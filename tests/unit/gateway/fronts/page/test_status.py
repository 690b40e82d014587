from __future__ import annotations

import asyncio
import json

import pytest

from blockyard.admin.v1 import admin_pb2
from gateway.fronts.page.routes import MAX_AGE_SECONDS, StatusBoard


class Asked:
    """Counts who asks, and answers when it may."""

    def __init__(self) -> None:
        self.count = 0
        self.models: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.error: Exception | None = None
        self.now = 100.0

    async def __call__(self, model: str) -> admin_pb2.GetStatusResponse:
        self.count += 1
        self.models.append(model)
        number = self.count
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        response = admin_pb2.GetStatusResponse(gateway=admin_pb2.GatewayStatus(num_requests=number))
        response.scheduler.replicas.add(replica_id=0, epoch=2**40)
        return response

    def clock(self) -> float:
        return self.now


@pytest.fixture
async def asked() -> Asked:
    return Asked()


@pytest.fixture
def board(asked: Asked) -> StatusBoard:
    return StatusBoard(asked, asked.clock)


async def told(board: StatusBoard, model: str = "") -> int:
    return json.loads(await board.encode(model))["gateway"]["num_requests"]


async def test_nobody_is_asked_while_nobody_looks(asked: Asked, board: StatusBoard) -> None:
    await asyncio.sleep(0)
    assert asked.count == 0


async def test_tells_names_of_the_proto_and_all_that_is_zero(board: StatusBoard) -> None:
    status = json.loads(await board.encode())
    assert status["gateway"]["ready"] is False
    (replica,) = status["scheduler"]["replicas"]
    assert (replica["replica_id"], replica["epoch"], replica["num_running_sequences"]) == (0, str(2**40), 0)
    assert replica["drain_state"] == "DRAIN_STATE_UNSPECIFIED"


async def test_a_moment_later_the_same_is_told(asked: Asked, board: StatusBoard) -> None:
    assert await told(board) == 1
    asked.now += MAX_AGE_SECONDS * 0.9
    assert await told(board) == 1
    asked.now += MAX_AGE_SECONDS * 0.2
    assert await told(board) == 2


async def test_each_model_is_asked_for_by_itself(asked: Asked, board: StatusBoard) -> None:
    assert [await told(board, model) for model in ("", "large", "", "large")] == [1, 2, 1, 2]
    assert asked.models == ["", "large"]


async def test_many_who_ask_at_once_are_one(asked: Asked, board: StatusBoard) -> None:
    asked.may_answer.clear()
    waiting = [asyncio.create_task(told(board)) for _ in range(20)]
    await asyncio.sleep(0)
    # However long it takes: who comes while it is asked for waits too.
    asked.now += 10
    waiting.append(asyncio.create_task(told(board)))
    await asyncio.sleep(0)
    asked.may_answer.set()
    assert await asyncio.gather(*waiting) == [1] * 21


async def test_one_who_leaves_takes_nothing_from_the_others(asked: Asked, board: StatusBoard) -> None:
    asked.may_answer.clear()
    first, second = (asyncio.create_task(told(board)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    asked.may_answer.set()
    assert await second == 1


async def test_a_failure_is_not_kept_for_longer_than_an_answer(asked: Asked, board: StatusBoard) -> None:
    asked.error = RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        await board.encode()
    asked.error = None
    asked.now += MAX_AGE_SECONDS
    assert await told(board) == 2
