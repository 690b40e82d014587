"""Records profiles of steps for a person to look at: their phases, and the operations that torch's profiler sees.

A profile is a file in the Trace Event Format of Chrome and Perfetto
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), compressed by gzip. Knows neither
messages nor how steps are computed. A profile has nothing of prompts or answers.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import tempfile
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity

from blockyard.errors import BlockyardError, Reason
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worker_service.device.thread import DeviceThread
    from worker_service.step import Step, StepTimes
    from worker_service.steps.step_executor import StepExecutor

log = EventLogger(__name__)


class ProfileDetail(Enum):
    """The detail of a profile: the phases of steps, or also the operations that torch's profiler sees."""

    STEPS = "STEPS"
    OPERATIONS = "OPERATIONS"


# The most steps of a profile: a file of some megabytes, and what takes some seconds to write.
MAX_STEPS = {ProfileDetail.STEPS: 20_000, ProfileDetail.OPERATIONS: 200}
_COMPRESSION = 6
# Tracks of ours; those of torch are named after processes and threads.
_STEP_TRACK, _QUEUE_TRACK = 1, 2


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """The detail to record, and the most steps."""

    detail: ProfileDetail
    max_steps: int


@dataclass(frozen=True, slots=True)
class Profile:
    """A finished profile of `worker`; `data` is its file."""

    worker: str
    options: ProfileOptions
    num_steps: int
    data: bytes


class _Record(NamedTuple):
    """One step. Times in seconds, by time.perf_counter()."""

    epoch: int
    step_id: int
    num_sequences: int
    num_tokens: int
    num_new_sequences: int
    num_moved_blocks: int
    begin: float
    end: float
    times: StepTimes


def choose_options(detail: ProfileDetail | None, max_steps: int, device: torch.device) -> ProfileOptions:
    """Fills in the defaults for no detail and for 0 steps."""
    chosen = detail or (ProfileDetail.OPERATIONS if device.type == "cuda" else ProfileDetail.STEPS)
    most = MAX_STEPS[chosen]
    return ProfileOptions(chosen, min(max_steps or most, most))


class ProfileRecording:
    """A profile in the making. Used in the device thread; `write` in any other."""

    def __init__(self, options: ProfileOptions, device: torch.device) -> None:
        self.options = options
        self.is_open = True
        self._records: list[_Record] = []
        # Added to the steps' clock, this gives nanoseconds since 1970, as torch's profiler counts.
        self._clock_offset_ns = time.time_ns() - time.perf_counter_ns()
        self._torch = _start_torch(device) if options.detail is ProfileDetail.OPERATIONS else None

    def record(self, step: Step, begin: float, times: StepTimes) -> None:
        """Takes a step that was just executed. `begin`: when it left the queue, by time.perf_counter()."""
        if not self.is_open:
            return
        moves = (step.blocks_to_swap_out, step.blocks_to_swap_in, step.blocks_to_copy)
        self._records.append(
            _Record(
                step.epoch,
                step.step_id,
                len(step.sequence_ids),
                int(step.num_new_tokens.sum()),
                len(step.new_sequences),
                sum(map(len, moves)),
                begin,
                time.perf_counter(),
                times,
            )
        )
        if len(self._records) >= self.options.max_steps:
            self.close()

    def close(self) -> None:
        """Stops recording. Never raises: a profile must not make a step fail."""
        if not self.is_open:
            return
        self.is_open = False
        if self._torch is not None:
            try:
                self._torch.stop()
            except Exception:
                log.exception("torch's profiler did not stop")
                self._torch = None

    def write(self, worker: str) -> Profile:
        """Makes the file; `worker` names the process in it. Takes up to some seconds."""
        buffer = io.BytesIO()
        with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=_COMPRESSION, mtime=0) as file:
            if self._torch is None:
                file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
                self._write_events(file, worker, base_ns=0)
                file.write(b"\n]}\n")
            else:
                self._write_with_torch(file, worker, self._torch)
        return Profile(worker, self.options, len(self._records), buffer.getvalue())

    def _write_with_torch(self, file: gzip.GzipFile, worker: str, profiler: torch.profiler.profile) -> None:
        """Adds our events to those of torch, on its clock."""
        with tempfile.TemporaryDirectory(prefix="blockyard-profile-") as folder:
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            trace: dict[str, Any] = json.loads(path.read_bytes())
        others: list[Any] = trace.pop("traceEvents")
        file.write(json.dumps(trace)[:-1].encode() + b', "traceEvents": [\n')
        self._write_events(file, worker, base_ns=int(trace.get("baseTimeNanoseconds", 0)))
        for event in others:
            file.write(b",\n" + json.dumps(event).encode())
        file.write(b"\n]}\n")

    def _write_events(self, file: gzip.GzipFile, worker: str, base_ns: int) -> None:
        events = [_name("process_name", 0, f"blockyard worker {worker}"), _name("thread_name", _STEP_TRACK, "steps")]
        file.write(",\n".join(map(json.dumps, events)).encode())
        offset_us = (self._clock_offset_ns - base_ns) / 1e3
        for record in self._records:
            for event in _events(record, offset_us):
                file.write(b",\n" + json.dumps(event).encode())


def _prepare_torch(device: torch.device) -> None:
    """Imports and loads what torch's profiler needs. It takes seconds, so it runs in a thread where no step waits."""
    # The profiler would write its own lines into the log. It raises its errors anyway.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    _start_torch(device).stop()


def _start_torch(device: torch.device) -> torch.profiler.profile:
    """Begins torch's profile of the calling thread, and of a GPU that it uses."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    profiler.start()
    return profiler


def _name(what: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": os.getpid(), "tid": track, "args": {"name": name}}


def _events(record: _Record, offset_us: float) -> Iterator[dict[str, Any]]:
    """Makes a step's events: its phases inside of it, its wait before, and its size over time."""
    times = record.times
    facts = {
        "epoch": record.epoch,
        "step_id": record.step_id,
        "num_sequences": record.num_sequences,
        "num_tokens": record.num_tokens,
        "num_new_sequences": record.num_new_sequences,
        "num_moved_blocks": record.num_moved_blocks,
    }
    moved = times.begun_at + times.cache_operations_seconds
    computed = moved + times.forward_seconds
    sampled = computed + times.sample_seconds
    parts = [
        ("step", record.begin, record.end, facts),
        ("rows", record.begin, times.begun_at, {}),
        ("cache operations", times.begun_at, moved, {}),
        ("forward", moved, computed, {}),
        ("sample", computed, sampled, {}),
        ("commit", sampled, record.end, {}),
    ]
    place = {"pid": os.getpid(), "tid": _STEP_TRACK}
    for name, begin, end, arguments in parts:
        span = {"ts": begin * 1e6 + offset_us, "dur": max(0.0, end - begin) * 1e6}
        yield {"ph": "X", "cat": "blockyard", "name": name, **place, **span, "args": arguments}
    waited = {"cat": "queue", "name": "in the queue", "id": f"{record.epoch}.{record.step_id}"}
    for phase, at in (("b", record.begin - times.queue_seconds), ("e", record.begin)):
        yield {"ph": phase, **waited, "pid": os.getpid(), "tid": _QUEUE_TRACK, "ts": at * 1e6 + offset_us}
    size = {"tokens": record.num_tokens, "sequences": record.num_sequences}
    yield {"ph": "C", "name": "size", **place, "ts": record.begin * 1e6 + offset_us, "args": size}


class Profiler:
    """A worker's profiles, one at a time. Lives in the event loop."""

    def __init__(self, thread: DeviceThread) -> None:
        self._thread = thread
        self._recording: ProfileRecording | None = None
        self._profile: Profile | None = None
        self._changing = asyncio.Lock()

    async def start(self, executor: StepExecutor, options: ProfileOptions, device: torch.device) -> None:
        """Begins a profile between two steps; raises BlockyardError WRONG_STATE while one is recorded."""
        async with self._changing:
            if self._recording is not None and self._recording.is_open:
                raise BlockyardError(Reason.WRONG_STATE, "a profile is recorded already: stop it first")
            self._profile = None
            if options.detail is ProfileDetail.OPERATIONS:
                await asyncio.to_thread(_prepare_torch, device)

            def begin() -> ProfileRecording:
                recording = ProfileRecording(options, device)
                executor.record = recording.record
                return recording

            self._recording = await self._thread.run(begin)
            log.info("profile begins", detail=options.detail.value, max_steps=options.max_steps)

    async def stop(self, executor: StepExecutor, worker: str) -> Profile:
        """Ends the profile between two steps, unless it has ended; gives the same one until another begins.

        Raises BlockyardError WRONG_STATE where none was begun.
        """
        async with self._changing:
            if self._recording is not None:
                self._profile = await self._end(self._recording, executor, worker)
                self._recording = None
            if self._profile is None:
                raise BlockyardError(Reason.WRONG_STATE, "no profile was begun")
            return self._profile

    async def _end(self, recording: ProfileRecording, executor: StepExecutor, worker: str) -> Profile:
        def end() -> None:
            recording.close()
            executor.record = None

        await self._thread.run(end)
        profile = await asyncio.to_thread(recording.write, worker)
        log.info("profile ends", num_steps=profile.num_steps, num_bytes=len(profile.data))
        return profile
