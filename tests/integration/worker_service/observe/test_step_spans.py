"""The spans of a step stream: which steps have one, which share one, and when each ends."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from blockyard.errors import BlockyardError, Reason
from tests.kit.processes.spans import CALLER, Recorder, recorded_spans
from worker_service.observe.step_spans import StepSpans
from worker_service.step import ForkedRow, NewRow, Step, StepOutput, StepTimes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blockyard.contract.trace import TraceContext

BUSY = 0.03


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with recorded_spans() as recorder:
        yield recorder
        recorder.check_all_ended()


class Stream:
    """Steps with their answers, one after the other."""

    def __init__(self) -> None:
        self.spans = StepSpans()
        self.step_id = 0

    def make(self, rows: dict[int, int], **fields: Any) -> Step:
        self.step_id += 1
        counts = np.array(list(rows.values()), np.int64)
        return Step(3, self.step_id, sequence_ids=tuple(rows), num_new_tokens=counts, **fields)

    def answer(self, step: Step, refusal: BlockyardError | None = None) -> None:
        times = StepTimes(0.001, 0.002, 0.02, 0.008, begun_at=time.perf_counter() - BUSY)
        self.spans.on_result(StepOutput(step.epoch, step.step_id, times=times, refusal=refusal))

    def run(self, rows: dict[int, int], **fields: Any) -> None:
        step = self.make(rows, **fields)
        self.spans.on_step(step)
        self.answer(step)


def new(sequence_id: int, context: TraceContext | None = CALLER) -> NewRow:
    return NewRow(sequence_id, 0, np.arange(8), 8, 0, np.arange(1), trace_context=context, request_id="r")


def test_a_prefill_step_has_a_span_and_the_decodes_share_one(recorder: Recorder) -> None:
    stream, begin = Stream(), time.perf_counter()
    stream.run({1: 5, 9: 1}, new_sequences=(new(1), new(9, None)))
    stream.run({1: 3, 9: 1})
    for _ in range(4):
        stream.run({1: 1, 9: 1})
    stream.run({9: 1}, finished_sequence_ids=(1,))
    seen = recorder.seen
    first, second = seen.named("prefill step")
    decodes = seen.one("decode steps")
    assert len(seen.spans) == 3
    assert {(span.trace_id, span.parent_id) for span in seen.spans} == {(CALLER.trace_id, CALLER.traceparent[36:52])}
    assert first.attributes == {
        "request_id": "r",
        "epoch": 3,
        "step_id": 1,
        "sequence_id": 1,
        "num_new_tokens": 5,
        "num_step_sequences": 2,
        "num_step_tokens": 6,
        "queue_seconds": 0.001,
        "cache_operations_seconds": 0.002,
        "forward_seconds": 0.02,
        "sample_seconds": 0.008,
    }
    assert (second.attributes["step_id"], second.attributes["num_new_tokens"]) == (2, 3)
    assert decodes.attributes == {"request_id": "r", "sequence_id": 1, "epoch": 3, "num_steps": 4, "last_step_id": 6}
    assert BUSY - 1e-3 <= first.seconds <= BUSY + time.perf_counter() - begin
    assert decodes.seconds >= BUSY
    assert stream.spans._traced == {}


def test_steps_are_answered_later_than_they_come(recorder: Recorder) -> None:
    stream = Stream()
    steps = [stream.make({1: 8}, new_sequences=(new(1),)), stream.make({1: 1}), stream.make({1: 1})]
    steps.append(stream.make({}, finished_sequence_ids=(1,)))
    for step in steps:
        stream.spans.on_step(step)
    for step in steps:
        stream.answer(step)
    assert recorder.seen.one("decode steps").attributes["num_steps"] == 2


def test_a_preempted_sequence_decodes_in_several_runs(recorder: Recorder) -> None:
    stream = Stream()
    stream.run({1: 8, 2: 8}, new_sequences=(new(1), new(2)))
    stream.run({1: 1, 2: 1})
    stream.run({1: 1})
    stream.run({1: 1, 2: 1})
    # Prefilled again: a new life.
    stream.run({1: 1, 2: 10}, new_sequences=(new(2),), finished_sequence_ids=(2,))
    stream.run({1: 1, 2: 1})
    stream.run({}, finished_sequence_ids=(1, 2))
    runs = [
        (span.attributes["sequence_id"], span.attributes["num_steps"]) for span in recorder.seen.named("decode steps")
    ]
    assert sorted(runs) == [(1, 5), (2, 1), (2, 1), (2, 1)]
    assert len(recorder.seen.named("prefill step")) == 3


def test_a_child_hangs_under_its_parents_span(recorder: Recorder) -> None:
    stream = Stream()
    stream.run({1: 4}, new_sequences=(new(1),))
    stream.run({1: 4, 2: 0}, forks=(ForkedRow(1, 2, 1, np.arange(1)),))
    stream.run({1: 1, 2: 1})
    stream.run({}, finished_sequence_ids=(1, 2))
    assert {span.attributes["sequence_id"] for span in recorder.seen.named("decode steps")} == {1, 2}


def test_children_of_a_last_piece_are_traced_from_it_on(recorder: Recorder) -> None:
    """In a step forks come before new sequences: a parent is known already, as the contract says."""
    stream = Stream()
    stream.run({1: 4}, new_sequences=(new(1),))
    stream.run({1: 4, 2: 0, 3: 0}, forks=(ForkedRow(1, 2, 1, np.arange(1)), ForkedRow(1, 3, 2, np.arange(1))))
    prefills = [span.attributes for span in recorder.seen.named("prefill step")]
    told = sorted((each["sequence_id"], each["num_new_tokens"]) for each in prefills)
    assert told == [(1, 4), (1, 4), (2, 0), (3, 0)]
    stream.spans.close()


def test_what_decodes_when_the_stream_ends_is_told_as_lost(recorder: Recorder) -> None:
    stream = Stream()
    stream.run({1: 8}, new_sequences=(new(1),))
    stream.run({1: 1})
    stream.spans.close()
    assert recorder.seen.one("decode steps").error == "the step stream ended"


def test_a_refusal_ends_what_decodes(recorder: Recorder) -> None:
    stream = Stream()
    stream.run({1: 8}, new_sequences=(new(1),))
    stream.run({1: 1})
    refused = stream.make({1: 1})
    stream.spans.on_step(refused)
    stream.answer(refused, BlockyardError(Reason.WRONG_STATE, "no"))
    assert recorder.seen.one("decode steps").error == "WRONG_STATE"
    stream.spans.close()


def test_a_stream_without_traced_sequences_keeps_nothing(recorder: Recorder) -> None:
    stream = Stream()
    stream.run({1: 8}, new_sequences=(new(1, None),))
    stream.spans.on_step(stream.make({1: 1}))
    assert not stream.spans._unanswered
    assert recorder.seen.spans == []


def test_after_the_last_traced_sequence_nothing_is_kept(recorder: Recorder) -> None:
    stream = Stream()
    stream.run({1: 8, 2: 8}, new_sequences=(new(1), new(2, None)))
    stream.run({2: 1}, finished_sequence_ids=(1,))
    stream.spans.on_step(stream.make({2: 1}))
    assert not stream.spans._unanswered


def test_off_nothing_of_opentelemetry_is_imported() -> None:
    program = "import worker_service.server, sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert not [name for name in run.stdout.split() if name.startswith("opentelemetry")]


def test_every_step_can_have_a_span() -> None:
    with recorded_spans(every_step=True) as recorder:
        stream = Stream()
        stream.run({1: 8}, new_sequences=(new(1),))
        for _ in range(3):
            stream.run({1: 1})
        stream.run({}, finished_sequence_ids=(1,))
        seen = recorder.seen
    assert [span.attributes["step_id"] for span in seen.named("decode step")] == [2, 3, 4]
    assert seen.one("decode steps").attributes["num_steps"] == 3


def test_the_message_that_a_worker_drains_is_no_answer(recorder: Recorder) -> None:
    stream = Stream()
    stream.run({1: 8}, new_sequences=(new(1),))
    stream.spans.on_step(stream.make({1: 1}))
    stream.spans.on_result(StepOutput(3, 2, draining=True))
    assert len(stream.spans._unanswered) == 1
    stream.spans.close()
