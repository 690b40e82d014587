"""Profiles of steps: what is in the file, when one may begin and end, and that steps do not notice."""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from blockyard.common.v1 import administration_pb2
from blockyard.errors import Reason
from blockyard.worker.v1 import worker_pb2 as pb
from tests.unit.worker_service.driver import fails, new_sequence, sampling
from worker_service.observe import profiler
from worker_service.observe.profiler import (
    MAX_STEPS,
    Profile,
    ProfileDetail,
    ProfileOptions,
    ProfileRecording,
    choose_options,
)
from worker_service.operations.codec import PIECE_BYTES, encode_profile
from worker_service.step import Step, StepTimes

if TYPE_CHECKING:
    from tests.unit.worker_service.driver import StepDriver, WorkerDriver

CPU = torch.device("cpu")
PHASES = {"rows", "cache operations", "forward", "sample", "commit"}


async def start(worker: WorkerDriver, **options: Any) -> administration_pb2.ProfileOptions:
    request = pb.StartProfileRequest(options=administration_pb2.ProfileOptions(**options))
    return (await worker.stub.StartProfile(request)).options


async def stop(worker: WorkerDriver) -> tuple[administration_pb2.ProfileSummary, bytes]:
    pieces = [piece async for piece in worker.stub.StopProfile(pb.StopProfileRequest())]
    return pieces[0].summary, b"".join(piece.data for piece in pieces[1:])


async def begin_sequence(worker: WorkerDriver, epoch: int = 1) -> StepDriver:
    steps = worker.open(epoch)
    await steps.step(new_sequences=[new_sequence(1, [1, 2, 3], [1, 2])], sequence_ids=[1], num_new_tokens=[3])
    return steps


def spans(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["name"] == name]


async def test_a_profile_has_each_step_with_its_phases(worker: WorkerDriver) -> None:
    steps = await begin_sequence(worker)
    options = await start(worker)
    assert options.detail == administration_pb2.PROFILE_DETAIL_STEPS
    assert options.max_steps == MAX_STEPS[ProfileDetail.STEPS]
    await steps.decode(1, 5)
    summary, data = await stop(worker)
    assert (summary.num_steps, summary.num_bytes) == (5, len(data))
    assert summary.worker.endswith((await worker.info()).incarnation)
    trace = json.loads(gzip.decompress(data))
    found = spans(trace, "step")
    assert [event["args"]["step_id"] for event in found] == [2, 3, 4, 5, 6]
    assert all(event["args"]["num_tokens"] == event["args"]["num_sequences"] == 1 for event in found)
    for step in found:
        inside = [
            e for e in trace["traceEvents"] if e["ph"] == "X" and step["ts"] <= e["ts"] <= step["ts"] + step["dur"]
        ]
        assert {event["name"] for event in inside} == {*PHASES, "step"}
        # The phases fill the step and do not overlap.
        assert sum(event["dur"] for event in inside) == pytest.approx(2 * step["dur"], abs=1.0)
    # One after the other.
    assert all(b["ts"] >= a["ts"] + a["dur"] - 1e-3 for a, b in itertools.pairwise(found))


async def test_a_profile_is_named_and_dated(worker: WorkerDriver) -> None:
    steps = await begin_sequence(worker)
    await start(worker)
    await steps.decode(1, 1)
    _, data = await stop(worker)
    events = json.loads(gzip.decompress(data))["traceEvents"]
    names = {event["name"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert (await worker.info()).worker_id in names["process_name"]
    [step] = [event for event in events if event["name"] == "step"]
    # Microseconds since 1970, as other traces of this machine count.
    assert 1.7e15 < step["ts"] < 4e15
    waits = {event["ph"]: event for event in events if event.get("cat") == "queue"}
    assert waits["b"]["ts"] <= waits["e"]["ts"] == step["ts"]
    [size] = [event for event in events if event["ph"] == "C"]
    assert size["args"] == {"tokens": 1, "sequences": 1}


async def test_a_profile_ends_by_itself(worker: WorkerDriver) -> None:
    steps = await begin_sequence(worker)
    assert (await start(worker, max_steps=3)).max_steps == 3
    await steps.decode(1, 5)
    summary, data = await stop(worker)
    assert summary.num_steps == 3
    assert len(spans(json.loads(gzip.decompress(data)), "step")) == 3


async def test_one_profile_at_a_time(worker: WorkerDriver) -> None:
    steps = await begin_sequence(worker)
    assert (await fails(stop(worker))).reason is Reason.WRONG_STATE
    await start(worker, max_steps=2)
    assert (await fails(start(worker))).reason is Reason.WRONG_STATE
    await steps.decode(1, 2)
    # It has ended: nobody has to fetch it before the next.
    await start(worker)
    await steps.decode(1, 1)
    summary, data = await stop(worker)
    assert summary.num_steps == 1
    # Whose connection broke asks again.
    assert await stop(worker) == (summary, data)
    await start(worker)
    assert (await stop(worker))[0].num_steps == 0


async def test_a_profile_goes_on_in_the_next_epoch(worker: WorkerDriver) -> None:
    steps = await begin_sequence(worker)
    await start(worker)
    await steps.decode(1, 2)
    steps.call.cancel()
    again = await begin_sequence(worker, epoch=2)
    await again.decode(1, 1)
    summary, data = await stop(worker)
    assert summary.num_steps == 4
    assert [event["args"]["epoch"] for event in spans(json.loads(gzip.decompress(data)), "step")] == [1, 1, 2, 2]


async def test_a_profile_of_operations_has_those_of_torch_too(worker: WorkerDriver) -> None:
    steps = await begin_sequence(worker)
    options = await start(worker, detail=administration_pb2.PROFILE_DETAIL_OPERATIONS, max_steps=10**6)
    assert options.max_steps == MAX_STEPS[ProfileDetail.OPERATIONS]
    tokens = await steps.decode(1, 4)
    # A prompt is computed by torch where a decode is one call of the kernels.
    await steps.step(
        new_sequences=[new_sequence(2, [1, 2, 3], [3], sampling=sampling(prompt_logprobs=1))],
        sequence_ids=[2],
        num_new_tokens=[3],
    )
    summary, data = await stop(worker)
    assert (summary.num_steps, len(tokens)) == (5, 4)
    trace = json.loads(gzip.decompress(data))
    operations = [event for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
    assert operations
    last = spans(trace, "step")[-1]
    # On one clock.
    inside = [event for event in operations if last["ts"] <= event["ts"] <= last["ts"] + last["dur"]]
    assert inside


async def test_steps_give_the_same_while_they_are_watched(worker: WorkerDriver) -> None:
    steps = await begin_sequence(worker)
    alone = await steps.decode(1, 6)
    steps.call.cancel()
    again = await begin_sequence(worker, epoch=2)
    await start(worker, detail=administration_pb2.PROFILE_DETAIL_OPERATIONS)
    assert await again.decode(1, 6) == alone
    await stop(worker)


async def test_torch_is_loaded_where_no_step_waits(worker: WorkerDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    begun_in: list[str] = []
    start_torch = profiler._start_torch

    def noting(device: torch.device) -> torch.profiler.profile:
        begun_in.append(threading.current_thread().name)
        return start_torch(device)

    monkeypatch.setattr(profiler, "_start_torch", noting)
    await start(worker)
    assert begun_in == []
    await stop(worker)
    await start(worker, detail=administration_pb2.PROFILE_DETAIL_OPERATIONS)
    first, second = begun_in
    assert (first == "device", second) == (False, "device")
    await stop(worker)


async def test_without_a_cache_there_is_nothing_to_profile(fresh_worker: WorkerDriver) -> None:
    assert (await fails(start(fresh_worker))).reason is Reason.WRONG_STATE
    assert (await fails(stop(fresh_worker))).reason is Reason.WRONG_STATE


async def test_a_profiler_that_breaks_breaks_no_step(
    worker: WorkerDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def stop(self) -> None:
            raise RuntimeError("out of luck")

    monkeypatch.setattr(profiler, "_prepare_torch", lambda device: None)
    monkeypatch.setattr(profiler, "_start_torch", lambda device: Broken())
    steps = await begin_sequence(worker)
    await start(worker, detail=administration_pb2.PROFILE_DETAIL_OPERATIONS, max_steps=2)
    assert len(await steps.decode(1, 4)) == 4
    # What was recorded of the steps themselves is there.
    summary, data = await stop(worker)
    assert summary.num_steps == 2
    assert len(spans(json.loads(gzip.decompress(data)), "step")) == 2
    assert "torch's profiler did not stop" in caplog.text


async def test_log_levels_change_while_it_runs(fresh_worker: WorkerDriver) -> None:
    logging.getLogger("blockyard").setLevel("WARNING")
    debug, warning = administration_pb2.LOG_LEVEL_DEBUG, administration_pb2.LOG_LEVEL_WARNING
    response = await fresh_worker.stub.SetLogLevel(pb.SetLogLevelRequest(level=debug))
    assert response.previous_level == warning
    assert logging.getLogger("worker_service").isEnabledFor(logging.DEBUG)
    response = await fresh_worker.stub.SetLogLevel(pb.SetLogLevelRequest(level=warning))
    assert response.previous_level == debug
    error = await fails(fresh_worker.stub.SetLogLevel(pb.SetLogLevelRequest()))
    assert (error.reason, error.violations[0].field) == (Reason.FIELD_INVALID, "level")


@pytest.mark.parametrize(
    ("detail", "max_steps", "device", "chosen"),
    [
        (None, 0, "cpu", ProfileOptions(ProfileDetail.STEPS, 20_000)),
        (None, 0, "cuda", ProfileOptions(ProfileDetail.OPERATIONS, 200)),
        (ProfileDetail.STEPS, 7, "cuda", ProfileOptions(ProfileDetail.STEPS, 7)),
        (ProfileDetail.OPERATIONS, 10**9, "cpu", ProfileOptions(ProfileDetail.OPERATIONS, 200)),
    ],
)
def test_what_is_left_open_is_chosen(
    detail: ProfileDetail | None, max_steps: int, device: str, chosen: ProfileOptions
) -> None:
    assert choose_options(detail, max_steps, torch.device(device)) == chosen


def test_a_profile_of_no_steps_is_a_file_too() -> None:
    recording = ProfileRecording(ProfileOptions(ProfileDetail.STEPS, 10), CPU)
    recording.close()
    profile = recording.write("w x")
    assert profile.num_steps == 0
    assert json.loads(gzip.decompress(profile.data))["traceEvents"]


def test_the_largest_profile_stays_small() -> None:
    recording = ProfileRecording(ProfileOptions(ProfileDetail.STEPS, 2000), CPU)
    for number in range(3000):
        recording.record(Step(1, number), 0.0, StepTimes(0.001, 0.0, 0.002, 0.001, 0.0))
    assert not recording.is_open
    profile = recording.write("w x")
    assert profile.num_steps == 2000
    assert len(profile.data) < 100 * profile.num_steps


def test_a_large_file_goes_in_pieces() -> None:
    data = bytes(2 * PIECE_BYTES + 5)
    first, *pieces = encode_profile(Profile("w", ProfileOptions(ProfileDetail.STEPS, 1), 1, data))
    assert first.summary.num_bytes == len(data)
    assert [len(piece.data) for piece in pieces] == [PIECE_BYTES, PIECE_BYTES, 5]
