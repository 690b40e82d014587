"""The step stream: order, two in flight, refusals, epochs, broken streams, answers while a step computes."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blockyard.common.v1 import status_pb2
from blockyard.errors import Reason, from_status
from blockyard.service.servers import internal_channel
from blockyard.worker.v1 import worker_pb2 as pb
from tests.kit.processes.spans import CALLER
from tests.unit.worker_service.driver import WorkerDriver, fails, new_sequence, running_worker
from worker_service import server, servicer
from worker_service.steps.step_stream import MAX_EPOCH_JUMP

if TYPE_CHECKING:
    from pathlib import Path

    from blockyard.contract.trace import TraceContext

PROMPT = list(range(5, 25))
CACHE_READY, RUNNING = status_pb2.WORKER_STATE_CACHE_READY, status_pb2.WORKER_STATE_RUNNING


class Gate:
    """Holds the device thread before a step, until it is opened."""

    def __init__(self, worker: WorkerDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        executor: Any = worker.server.worker.set_up.executor
        execute = executor.execute

        def held(step: Any, arrival: float) -> Any:
            self.reached.set()
            assert self.opened.wait(20)
            return execute(step, arrival)

        monkeypatch.setattr(executor, "execute", held)
        monkeypatch.setattr(executor, "steady_rows", lambda _: None)


async def until_set(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 20)


def start(sequence_id: int = 1) -> dict[str, Any]:
    new = new_sequence(sequence_id, PROMPT, [1, 2, 3, 4])
    return {"new_sequences": [new], "sequence_ids": [sequence_id], "num_new_tokens": [20]}


async def test_steps_in_flight_are_answered_in_order_and_chain(worker: WorkerDriver) -> None:
    steps = worker.open(1)
    first = await steps.sampled(**start())
    expected = [first[1], *await steps.decode(1, 8)]
    await steps.step(finished_sequence_ids=[1])
    await steps.send(**start(2))
    for _ in range(8):
        await steps.send(sequence_ids=[2], num_new_tokens=[1])
    answers = [await steps.answer() for _ in range(9)]
    assert [answer.step_id for answer in answers] == list(range(11, 20))
    assert [answer.token_ids[0] for answer in answers] == expected


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"step_id": 3}, Reason.WRONG_STATE),
        ({"step_id": 1}, Reason.WRONG_STATE),
        ({"epoch": 2}, Reason.WRONG_STATE),
        ({"sequence_ids": [9], "num_new_tokens": [1]}, Reason.FIELD_INVALID),
    ],
)
async def test_a_refused_step_ends_the_epoch_and_no_other(
    worker: WorkerDriver, wrong: dict[str, Any], reason: Reason
) -> None:
    steps = worker.open(1)
    first = (await steps.sampled(**start()))[1]
    error = await steps.refused(**wrong)
    assert error.reason is reason
    executor = worker.server.worker.set_up.executor
    assert executor is not None
    assert executor.batch.token_ids(1).tolist() == [*PROMPT, first]
    # What would be right is refused too, and says since when.
    for _ in range(2):
        later = await steps.refused(sequence_ids=[1], num_new_tokens=[1])
        assert later.reason is Reason.WRONG_STATE
        assert "was refused" in later.message
    assert executor.batch.token_ids(1).tolist() == [*PROMPT, first]
    assert await worker.open(2).sampled(**start()) == {1: first}


async def test_an_unexpected_error_is_a_refusal(worker: WorkerDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = worker.open(1)
    await steps.step(**start())
    executor: Any = worker.server.worker.set_up.executor

    def broken(*_: Any) -> None:
        raise RuntimeError("secret of the device")

    with monkeypatch.context() as patched:
        patched.setattr(executor.runner, "run", broken)
        patched.setattr(executor, "steady_rows", lambda _: None)
        error = await steps.refused(sequence_ids=[1], num_new_tokens=[1])
    assert error.reason is Reason.BUG
    assert "secret" not in error.message
    assert (await steps.refused()).reason is Reason.WRONG_STATE
    assert 1 in await worker.open(2).sampled(**start())


async def test_a_higher_epoch_ends_the_stream_before_and_forgets_its_sequences(worker: WorkerDriver) -> None:
    old = worker.open(4)
    await old.step(**start())
    new = worker.open(5)
    error = await new.refused(sequence_ids=[1], num_new_tokens=[1])
    assert "sequences [1] are not known" in error.message
    ended = await old.end_error()
    assert ended.reason is Reason.WRONG_STATE
    assert "epoch 5 took over" in ended.message
    info = await worker.info()
    assert (info.epoch, info.state) == (5, RUNNING)


@pytest.mark.parametrize("epoch", [4, 3, 0])
async def test_an_epoch_that_is_not_higher_is_refused_and_disturbs_nobody(worker: WorkerDriver, epoch: int) -> None:
    running = worker.open(4)
    first = await running.sampled(**start())
    stale = worker.open(epoch)
    for _ in range(2):
        error = await stale.refused(**start(7))
        assert error.reason is Reason.WRONG_STATE
        assert error.metadata == {"epoch": "4"}
    stale.call.cancel()
    again = await running.sampled(sequence_ids=[1], num_new_tokens=[1])
    assert set(again) == set(first)
    assert (await worker.info()).state == RUNNING


@pytest.mark.parametrize("epoch", [2**64 - 1, 4 + MAX_EPOCH_JUMP + 1])
async def test_an_epoch_far_ahead_is_refused_and_the_next_one_is_taken(worker: WorkerDriver, epoch: int) -> None:
    running = worker.open(4)
    first = await running.sampled(**start())
    error = await worker.open(epoch).refused(**start())
    assert error.reason is Reason.WRONG_STATE
    assert f"epoch {epoch} is too far ahead: epoch 4 was seen, and 5 comes next" in error.message
    assert set(await running.sampled(sequence_ids=[1], num_new_tokens=[1])) == set(first)
    assert (await worker.info()).epoch == 4
    assert await worker.open(5).sampled(**start()) == first
    # A group's other workers may have seen more.
    assert await worker.open(5 + MAX_EPOCH_JUMP).sampled(**start()) == first


async def test_steps_of_an_old_epoch_that_wait_are_dropped(
    worker: WorkerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = worker.open(1)
    expected = await old.sampled(**start())
    gate = Gate(worker, monkeypatch)
    await old.send(sequence_ids=[1], num_new_tokens=[1])
    await until_set(gate.reached)
    await old.send(sequence_ids=[1], num_new_tokens=[1])
    new = worker.open(2)
    await new.send(**start())
    await worker.wait_for(lambda info: info.epoch == 2)
    gate.opened.set()
    answer = await new.answer()
    assert dict(zip(answer.sequence_ids, answer.token_ids, strict=True)) == expected
    # The step that ran was answered; the one that waited was not.
    assert (await old.answer()).step_id == 2
    assert (await old.end_error()).reason is Reason.WRONG_STATE


async def test_a_broken_stream_forgets_everything(worker: WorkerDriver) -> None:
    steps = worker.open(1)
    await steps.step(**start())
    steps.call.cancel()
    info = await worker.wait_for(lambda info: info.state == CACHE_READY)
    assert info.epoch == 1
    error = await worker.open(2).refused(sequence_ids=[1], num_new_tokens=[1])
    assert "not known" in error.message


async def test_a_connection_that_breaks_is_a_stream_that_breaks(worker: WorkerDriver) -> None:
    async with internal_channel(worker.server.address) as channel:
        other = WorkerDriver(worker.server, channel)
        await other.open(1).step(**start())
        assert (await worker.info()).state == RUNNING
    await worker.wait_for(lambda info: info.state == CACHE_READY)


async def test_a_stream_that_is_closed_gets_its_last_answers(worker: WorkerDriver) -> None:
    steps = worker.open(1)
    await steps.send(**start())
    await steps.send(sequence_ids=[1], num_new_tokens=[1])
    await steps.call.done_writing()
    assert [(await steps.answer()).step_id for _ in range(2)] == [1, 2]
    assert await steps.call.read() is grpc.aio.EOF
    await worker.wait_for(lambda info: info.state == CACHE_READY)


async def test_everything_is_answered_while_a_step_computes(
    worker: WorkerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = worker.open(1)
    await steps.step(**start())
    gate = Gate(worker, monkeypatch)
    await steps.send(sequence_ids=[1], num_new_tokens=[1])
    await until_set(gate.reached)
    health = health_pb2_grpc.HealthStub(worker.channel)
    for service in ("", "liveness", "readiness"):
        response = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        assert response.status == health_pb2.HealthCheckResponse.SERVING
    assert (await worker.info()).state == RUNNING
    checksums = asyncio.create_task(worker.checksums(device=[1]))
    gate.opened.set()
    assert (await steps.answer()).token_ids
    assert await checksums


async def test_health_is_answered_on_a_port_of_its_own(socket_folder: Path) -> None:
    statuses = health_pb2.HealthCheckResponse
    async with running_worker(socket_folder, worker_health_port=0) as worker:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{worker.server.monitoring.health_port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            told = [
                await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5) for name in ("", "loaded")
            ]
        assert [response.status for response in told] == [statuses.SERVING, statuses.NOT_SERVING]


async def test_a_worker_is_loaded_when_steps_can_be_sent_and_ready_before(
    fresh_worker: WorkerDriver, model: Path
) -> None:
    health = health_pb2_grpc.HealthStub(fresh_worker.channel)

    async def told() -> dict[str, int]:
        asked = [health_pb2.HealthCheckRequest(service=service) for service in ("readiness", "loaded")]
        return {request.service: (await health.Check(request, timeout=5)).status for request in asked}

    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert await told() == {"readiness": serving, "loaded": not_serving}
    await fresh_worker.load(model)
    assert await told() == {"readiness": serving, "loaded": not_serving}, "it has no cache yet"
    await fresh_worker.initialize_cache()
    assert await told() == {"readiness": serving, "loaded": serving}
    steps = fresh_worker.open(1)
    await steps.step(**start())
    assert await told() == {"readiness": serving, "loaded": serving}


async def test_a_worker_that_stops_finishes_its_step_and_says_that_it_drains(
    worker: WorkerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = worker.open(1)
    await steps.step(**start())
    gate = Gate(worker, monkeypatch)
    await steps.send(sequence_ids=[1], num_new_tokens=[1])
    await until_set(gate.reached)
    await steps.send(sequence_ids=[1], num_new_tokens=[1])
    stopping = asyncio.create_task(worker.server.stop())
    health = health_pb2_grpc.HealthStub(worker.channel)
    response = await health.Check(health_pb2.HealthCheckRequest(service="readiness"), timeout=5)
    assert response.status == health_pb2.HealthCheckResponse.NOT_SERVING
    gate.opened.set()
    answer = await steps.answer()
    assert (answer.step_id, answer.draining, len(answer.token_ids)) == (2, False, 1)
    last = await steps.answer()
    assert (last.epoch, last.step_id, last.draining, list(last.sequence_ids)) == (1, 2, True, [])
    assert (await steps.end_error()).reason is Reason.DRAINING
    assert await asyncio.wait_for(stopping, 20)


@pytest.mark.parametrize("num_steps", [0, 3])
async def test_a_worker_without_a_step_in_flight_says_that_it_drains(worker: WorkerDriver, num_steps: int) -> None:
    steps = worker.open(1)
    for _ in range(num_steps):
        await steps.step()
    await worker.wait_for(lambda _: worker.server.worker._streams._open)
    stopping = asyncio.create_task(worker.server.stop())
    last = await steps.answer()
    assert (last.epoch, last.step_id, last.draining) == (int(num_steps > 0), num_steps, True)
    steps.call.cancel()
    assert await asyncio.wait_for(stopping, 20)


@pytest.mark.parametrize("how", ["cancel", "half-close"])
async def test_a_worker_that_drains_is_gone_as_soon_as_its_stream_is_closed(
    worker: WorkerDriver, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(server, "CLOSE_SECONDS", 1000.0)
    steps = worker.open(1)
    await steps.step(**start())
    stopping = asyncio.create_task(worker.server.stop())
    assert (await steps.answer()).draining
    # What was on its way is not run, not answered, and no error.
    await steps.send(sequence_ids=[1], num_new_tokens=[1])
    if how == "cancel":
        steps.call.cancel()
    else:
        await steps.call.done_writing()
        assert await steps.call.read() is grpc.aio.EOF
    assert await asyncio.wait_for(stopping, 20)


async def test_a_worker_that_drains_refuses_what_is_new_and_tells_who_it_is(
    worker: WorkerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CLOSE_SECONDS", 1000.0)
    waiting, steps = worker.open(8), worker.open(7)
    await steps.step()
    assert not (await worker.info()).draining
    stopping = asyncio.create_task(worker.server.stop())
    assert (await steps.answer()).draining
    info = await worker.info()
    assert (info.draining, info.state, info.epoch) == (True, RUNNING, 7)
    assert (await worker.open(9).end_error()).reason is Reason.DRAINING
    assert (await fails(worker.stub.InitDevice(pb.InitDeviceRequest()))).reason is Reason.DRAINING
    assert (await fails(worker.initialize_cache())).reason is Reason.DRAINING
    # One that had not begun begins no more.
    assert (await waiting.answer()).draining
    await waiting.send()
    waiting.call.cancel()
    steps.call.cancel()
    assert await asyncio.wait_for(stopping, 20)
    assert worker.server.worker.epoch == 7


async def test_a_step_that_does_not_end_is_given_up_and_its_stream_ends_with_a_word(
    worker: WorkerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STOP_SECONDS", "CLOSE_SECONDS"):
        monkeypatch.setattr(server, name, 0.05)
    steps = worker.open(1)
    gate = Gate(worker, monkeypatch)
    await steps.send(**start())
    await until_set(gate.reached)
    stopping = asyncio.create_task(worker.server.stop())
    assert (await steps.end_error()).reason is Reason.DRAINING
    assert not await asyncio.wait_for(stopping, 20)
    gate.opened.set()


async def test_a_refusal_carries_its_violations(worker: WorkerDriver) -> None:
    steps = worker.open(1)
    await steps.send(new_sequences=[new_sequence(1, [5], [0])], forks=[{"parent_sequence_id": 1, "block_ids": [0]}])
    answer = await steps.answer()
    error = from_status(answer.refusal)
    assert {violation.field for violation in error.violations} == {
        "new_sequences[0].block_ids",
        "forks[0].block_ids",
    }
    assert (answer.epoch, answer.step_id) == (1, 1)


@pytest.mark.parametrize("context", [CALLER, None])
async def test_debug_events_tell_which_sequences_begin(
    worker: WorkerDriver, context: TraceContext | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "worker_service.steps.step_stream")
    traced = {} if context is None else {"trace_context": {"traceparent": context.traceparent}}
    steps = worker.open(1)
    await steps.step(**start() | {"new_sequences": [new_sequence(1, PROMPT, [1, 2, 3], request_id="r", **traced)]})
    await steps.decode(1, 1)
    [record] = [record for record in caplog.records if record.message == "sequence begins"]
    told = {"request_id": "r", "sequence_id": 1, "epoch": 1, "step_id": 1, "num_tokens": 20, "num_computed_tokens": 0}
    assert record.fields == told | ({"trace_id": context.trace_id} if context else {})  # type: ignore[attr-defined]


async def test_a_process_that_does_not_trace_makes_no_spans(
    worker: WorkerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "StepSpans", lambda: pytest.fail("spans were made"))
    steps = worker.open(1)
    await steps.sampled(**start())
