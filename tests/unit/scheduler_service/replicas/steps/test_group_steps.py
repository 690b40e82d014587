"""The steps of a group against ranks that are scripted: late, unlike, refusing, draining, gone."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from blockyard.contract.parallel import Parallel
from blockyard.errors import BlockyardError, Reason, to_status
from blockyard.worker.v1 import worker_pb2
from scheduler_service.core.values import SchedulerOutput
from scheduler_service.replicas.steps import group_steps
from scheduler_service.replicas.steps.answer_checks import AnswerLimits, WrongAnswer
from scheduler_service.replicas.steps.group_steps import GroupSteps
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

EPOCH = 7
LIMITS = AnswerLimits(vocab_size=100, max_model_len=100, max_rows=10)
GONE = BlockyardError(Reason.NO_READY_WORKER, "gone")
BROKEN = BlockyardError(Reason.GROUP_BROKEN, "a peer is gone")
BUG = BlockyardError(Reason.BUG, "cannot")

Answer = worker_pb2.ExecuteModelResponse | BlockyardError


class ScriptedCall:
    """Takes steps, and gives the answers that a test puts."""

    def __init__(self) -> None:
        self.steps: list[bytes] = []
        self.answers: asyncio.Queue[Answer] = asyncio.Queue()
        self.is_cancelled = False

    async def write(self, step: bytes) -> None:
        self.steps.append(step)

    async def read(self) -> worker_pb2.ExecuteModelResponse:
        answer = await self.answers.get()
        if isinstance(answer, BlockyardError):
            raise answer
        return answer

    def cancel(self) -> None:
        self.is_cancelled = True

    def put(self, answer: Answer) -> None:
        self.answers.put_nowait(answer)


def answer(step_id: int, *, digest: int = 1, output: int = 2, seconds: float = 0.0, token: int | None = None) -> Answer:
    message = worker_pb2.ExecuteModelResponse(epoch=EPOCH, step_id=step_id, input_digest=digest, output_digest=output)
    message.times.forward.FromNanoseconds(int(seconds * 1e9))
    if token is not None:
        message.sequence_ids.append(5)
        message.token_ids.append(token)
    return message


def refusal(step_id: int, error: BlockyardError) -> Answer:
    return worker_pb2.ExecuteModelResponse(epoch=EPOCH, step_id=step_id, refusal=to_status(error))


class Group(list[ScriptedCall]):
    """The ranks of a group, and the steps to them."""

    def __init__(self, tensor_parallel_size: int, pipeline_parallel_size: int = 1) -> None:
        parallel = Parallel(tensor_parallel_size, pipeline_parallel_size)
        super().__init__(ScriptedCall() for _ in range(parallel.world_size))
        self.steps = GroupSteps(self, EPOCH, LIMITS, parallel, lambda: 2.5)  # type: ignore[arg-type]

    async def send(self, *step_ids: int) -> None:
        for step_id in step_ids:
            await self.steps.send(SchedulerOutput(step_id=step_id, sequence_ids=(5,), num_new_tokens=(1,)))

    async def receive(self) -> int:
        """The token that the next step sampled."""
        return (await asyncio.wait_for(self.steps.receive(), 10)).token_ids[0]


@asynccontextmanager
async def group_of(tensor_parallel_size: int, pipeline_parallel_size: int = 1) -> AsyncIterator[Group]:
    group = Group(tensor_parallel_size, pipeline_parallel_size)
    try:
        yield group
    finally:
        group.steps.cancel()
        assert all(call.is_cancelled for call in group)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cause is waited for as long as it takes, so that no slow machine changes what is found."""
    monkeypatch.setattr(group_steps, "CAUSE_SECONDS", 60.0)
    yield


async def test_a_step_that_cannot_be_written_ends_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    async def write(step: bytes) -> None:
        raise ValueError("a bug")

    async with group_of(2) as group:
        monkeypatch.setattr(group[1], "write", write)
        await group.send(1)
        with pytest.raises(ValueError, match="a bug"):
            await group.receive()


async def test_all_ranks_get_the_same_bytes_with_the_time_that_they_have() -> None:
    async with group_of(4) as group:
        await group.send(1, 2)
        await until(lambda: all(len(call.steps) == 2 for call in group))
        assert len({tuple(call.steps) for call in group}) == 1
        message = worker_pb2.ExecuteModelRequest.FromString(group[0].steps[1])
        assert (message.epoch, message.step_id, message.quiet) == (EPOCH, 2, False)
        assert message.step_timeout.ToNanoseconds() == 2_500_000_000
        assert group.steps.encode_seconds > 0


async def test_stages_are_told_who_has_the_ids() -> None:
    async with group_of(2, 2) as group:
        await group.send(1, 2, 3, 4)
        await until(lambda: len(group[3].steps) == 4)
        messages = [worker_pb2.ExecuteModelRequest.FromString(step) for step in group[3].steps]
        assert [message.ids_from_scheduler for message in messages] == [True, False, False, False]
    async with group_of(4) as group:
        await group.send(1, 2)
        await until(lambda: len(group[0].steps) == 2)
        messages = [worker_pb2.ExecuteModelRequest.FromString(step) for step in group[0].steps]
        assert not any(message.ids_from_scheduler for message in messages)


async def test_a_step_counts_when_the_last_rank_has_answered_it() -> None:
    async with group_of(2) as group:
        await group.send(1, 2)
        group[0].put(answer(1, token=11, seconds=0.5))
        group[0].put(answer(2, token=12))
        receiving = asyncio.create_task(group.receive())
        await until(lambda: group[0].answers.empty())
        assert not receiving.done()
        group[1].put(answer(1, seconds=0.75))
        assert await receiving == 11
        # That of the slowest rank.
        assert group.steps.step_seconds == 0.75
        group[1].put(answer(2))
        assert await group.receive() == 12


async def test_the_sampling_rank_is_the_first_of_the_last_stage() -> None:
    async with group_of(2, 2) as group:
        await group.send(1)
        for rank, call in enumerate(group):
            call.put(answer(1, output=9 * (rank >= 2), token=30 + rank))
        assert await group.receive() == 32


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ([{}, {"digest": 3}], "ranks 0 and 1 differ in the input_digest"),
        ([{}, {"output": 3}], "ranks 0 and 1 differ in the output_digest"),
        ([{}, {}, {"digest": 3}, {}], "ranks 0 and 2 differ in the input_digest"),
        ([{"output": 0}, {"output": 0}, {}, {"output": 3}], "ranks 2 and 3 differ in the output_digest"),
    ],
)
async def test_ranks_that_differ_end_the_epoch_and_their_histories_are_logged(
    told: list[dict[str, int]], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    stages = 2 if told[0] else 1
    async with group_of(len(told) // stages, stages) as group:
        await group.send(*range(1, 21))
        for rank, call in enumerate(group):
            same = {"output": told[rank]["output"]} if told[0] and rank < 2 else {}
            for step_id in range(1, 20):
                call.put(answer(step_id, token=1, **same))
            call.put(answer(20, token=1, **told[rank]))
        for _ in range(19):
            await group.receive()
        with pytest.raises(BlockyardError, match=named) as caught:
            await group.receive()
    # No answer that cannot be: who computes the step that breaks it twice is to fail.
    assert caught.value.reason is Reason.BUG
    assert not isinstance(caught.value, WrongAnswer)
    [record] = [record for record in caplog.records if record.message == "two ranks differ: a bug"]
    fields = record.__dict__["fields"]
    histories = [fields["history"].split(), fields["other_history"].split()]
    assert [[each.partition(":")[0] for each in history] for history in histories] == [
        [str(step_id) for step_id in range(5, 21)]
    ] * 2
    assert [one == other for one, other in zip(*histories, strict=True)] == [True] * 15 + [False]


async def test_an_answer_of_another_step_or_epoch_is_wrong() -> None:
    for wrong in (answer(2), answer(1)):
        async with group_of(2) as group:
            await group.send(1, 2)
            if isinstance(wrong, worker_pb2.ExecuteModelResponse) and wrong.step_id == 1:
                wrong.epoch = EPOCH - 1
            group[1].put(wrong)
            with pytest.raises(WrongAnswer, match="where step 1 of epoch 7 was due"):
                await group.receive()
    async with group_of(2) as group:
        group[1].put(answer(1))
        with pytest.raises(WrongAnswer, match="step 1, which was not sent"):
            await group.receive()


async def test_what_was_answered_before_a_rank_broke_still_counts() -> None:
    async with group_of(2) as group:
        await group.send(1, 2)
        for call in group:
            call.put(answer(1, token=9))
        group[1].put(GONE)
        await until(lambda: group[1].answers.empty())
        assert await group.receive() == 9
        with pytest.raises(BlockyardError, match="gone"):
            await group.receive()


async def test_no_cause_is_waited_for_where_all_ranks_name_an_effect() -> None:
    async with group_of(2) as group:
        await group.send(1)
        for call in group:
            call.put(refusal(1, BROKEN))
        with pytest.raises(BlockyardError) as caught:
            await asyncio.wait_for(group.receive(), 20)
        assert caught.value.reason is Reason.GROUP_BROKEN


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (GONE, Reason.NO_READY_WORKER),
        (BlockyardError(Reason.DRAINING, "stops"), Reason.DRAINING),
        (refusal(1, BUG), Reason.BUG),
        (refusal(1, BROKEN), Reason.GROUP_BROKEN),
    ],
)
async def test_the_first_rank_that_breaks_ends_the_epoch(
    error: Answer, reason: Reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_steps, "CAUSE_SECONDS", 0.01)
    async with group_of(2) as group:
        await group.send(1)
        group[0].put(answer(1, token=1))
        group[1].put(error)
        with pytest.raises(BlockyardError) as caught:
            await group.receive()
        assert caught.value.reason is reason


@pytest.mark.parametrize("cause", [GONE, refusal(1, BUG)])
async def test_a_rank_that_lost_its_group_names_no_cause(cause: Answer, caplog: pytest.LogCaptureFixture) -> None:
    async with group_of(4) as group:
        await group.send(1)
        for rank in (0, 1, 3):
            group[rank].put(refusal(1, BROKEN))
        receiving = asyncio.create_task(group.receive())
        await until(lambda: all(call.answers.empty() for call in group))
        group[2].put(cause)
        with pytest.raises(BlockyardError) as caught:
            await receiving
        assert caught.value.reason in (Reason.NO_READY_WORKER, Reason.BUG)
    [record] = [record for record in caplog.records if record.message == "a rank ended the epoch"]
    assert record.__dict__["fields"]["rank"] == 2


async def test_a_bug_of_ours_is_raised_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    async with group_of(2) as group:
        await group.send(1)
        group[1].put("no message at all")  # type: ignore[arg-type]
        with pytest.raises(AttributeError):
            await group.receive()


# Worlds above 4.


async def test_large_worlds_answer_each_eighth_step() -> None:
    async with group_of(8) as group:
        await group.send(*range(1, 17))
        await until(lambda: len(group[7].steps) == 16)
        quiet = [worker_pb2.ExecuteModelRequest.FromString(step).quiet for step in group[3].steps]
        assert quiet == ([True] * 7 + [False]) * 2
        for step_id in range(1, 8):
            group[0].put(answer(step_id, token=step_id))
            assert await group.receive() == step_id
        for call in group:
            call.put(answer(8, token=8))
        assert await group.receive() == 8
        for step_id in range(9, 17):
            group[0].put(answer(step_id, token=step_id))
        for call in group[1:7]:
            call.put(answer(16))
        group[7].put(answer(16, digest=99))
        for step_id in range(9, 16):
            assert await group.receive() == step_id
        with pytest.raises(BlockyardError, match="ranks 0 and 7 differ"):
            await group.receive()


async def test_a_rank_says_at_once_that_a_quiet_step_failed() -> None:
    async with group_of(8) as group:
        await group.send(1, 2)
        group[5].put(refusal(2, BUG))
        with pytest.raises(BlockyardError, match="cannot"):
            await group.receive()


async def test_a_rank_that_answers_a_quiet_step_is_wrong() -> None:
    async with group_of(8) as group:
        await group.send(1)
        group[5].put(answer(1))
        with pytest.raises(WrongAnswer, match="where step 8 of epoch 7 was due"):
            await group.receive()
