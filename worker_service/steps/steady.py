"""Steady steps: decodes whose sequences are those of the step before. A loop without Python runs them.

What a step computes is written twice, in C++ and in the executor, which is the reference: arrays and answers are the
same to the last byte. A step is steady if only its blocks and drafts differ from the step before it, and if no sequence
needs more than a choice by temperature and filters. All others end the loop, and Python goes on where it stood.

One thread runs the loop, the device's. The event loop's thread hands it steps and sends the answers, those of the other
steps too: all answers have one order.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress, count
from typing import TYPE_CHECKING

import numpy as np

from blockyard_kernels.decoding import StepRecord
from worker_service.step import NO_IDS, Step, StepOutput, StepTimes

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockyard_kernels.decoding import DecodeLoop, DecodeRows, StepAnswer
    from worker_service.step import Array


@dataclass(frozen=True, slots=True, eq=False)
class SteadyStep:
    """A step that is like the one before it, and its record. `on_answer` is called in the event loop's thread."""

    step: Step
    arrival: float
    number: int
    words: Array
    on_answer: Callable[[Step, StepOutput], None]


class SteadySteps:
    def __init__(self, loop: DecodeLoop) -> None:
        self._loop = loop
        self._numbers = count(1)
        # By number: steps that were handed over, and what else has its turn among the answers.
        self._waiting: dict[int, SteadyStep | Callable[[], None]] = {}
        self._num_streams = 0
        # The epoch and the sequences of the last step that arrived, and the place of each.
        self._like: tuple[int, tuple[int, ...]] = (0, ())
        self._places: dict[int, int] = {}
        self.num_steps = 0
        """Steps that the loop has run."""

    def attach(self) -> None:
        """Sends answers from now on, in the thread of the running event loop."""
        self._num_streams += 1
        if self._num_streams == 1:
            asyncio.get_running_loop().add_reader(self._loop.event, self.send)

    def detach(self) -> None:
        """Undoes one `attach`."""
        self._num_streams -= 1
        if not self._num_streams:
            asyncio.get_running_loop().remove_reader(self._loop.event)

    def read(self, step: Step, arrival: float, on_answer: Callable[[Step, StepOutput], None]) -> SteadyStep | None:
        """Takes the next step that arrives; returns None if it is not like the one before it."""
        like = step.epoch, step.sequence_ids
        if like != self._like:
            self._like, self._places = like, {}
            return None
        if not self._places:
            self._places = {sequence_id: place for place, sequence_id in enumerate(step.sequence_ids)}
        if not self._places or not _is_steady(step, self._places):
            return None
        number = next(self._numbers)
        appended = NO_IDS
        if step.appended_sequence_ids:
            appended = np.array([self._places[sequence_id] for sequence_id in step.appended_sequence_ids], np.int64)
        columns = step.appended_block_ids, step.max_draft_tokens, step.draft_prices
        words = StepRecord(number, step.step_id, arrival, appended, *columns).words()
        return SteadyStep(step, arrival, number, words, on_answer)

    def push(self, steady: SteadyStep) -> bool:
        """Hands a step to the loop; returns False if it does not run, or ends."""
        self._waiting[steady.number] = steady
        if self._loop.push(steady.words):
            return True
        del self._waiting[steady.number]
        return False

    def run(self, first: SteadyStep, rows: DecodeRows, may_go_on: Callable[[], bool]) -> tuple[int, list[SteadyStep]]:
        """Runs steps until one is not steady, or the loop is ended. Called in the device's thread.

        Args:
            first: the first step.
            rows: the rows of its sequences.
            may_go_on: whether the loop waits for further steps; asked when `end` has an effect.

        Returns:
            The id of the last step that was run, and the steps that were not, in order.
        """
        self._waiting[first.number] = first
        self._loop.open(rows, first.step.step_id - 1, first.words)
        if not may_go_on():
            self._loop.end()
        last_step_id, left = self._loop.run()
        return last_step_id, [step for number in left if isinstance(step := self._waiting.pop(number), SteadyStep)]

    def end(self) -> None:
        """Lets the loop return when it has run the steps that it was handed. Any thread may call it."""
        self._loop.end()

    def drop(self) -> None:
        """Lets the loop return after the running step."""
        self._loop.end(drops=True)

    def tell(self, callback: Callable[[], None]) -> None:
        """Calls back in the event loop's thread, behind the answers of the steps so far."""
        number = next(self._numbers)
        self._waiting[number] = callback
        self._loop.tell(number)

    def send(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._loop.event)
        while (answer := self._loop.take()) is not None:
            waiting = self._waiting.pop(answer if isinstance(answer, int) else answer.number)
            if isinstance(waiting, SteadyStep):
                assert not isinstance(answer, int)
                self.num_steps += 1
                waiting.on_answer(waiting.step, make_output(waiting.step, answer))
            else:
                waiting()


def _is_steady(step: Step, places: dict[int, int]) -> bool:
    """Returns whether a step decodes one token of each sequence and does nothing else, except for blocks and drafts."""
    if step.decode_error is not None or step.ids_from_scheduler or len(places) != len(step.sequence_ids):
        return False
    if step.new_sequences or step.forks or step.finished_sequence_ids or step.replaced_tables:
        return False
    if step.input_sequence_ids or len(step.input_token_ids):
        return False
    if len(step.activated_lora_slots) or len(step.activated_lora_ids):
        return False
    for pairs in (step.blocks_to_swap_out, step.blocks_to_swap_in, step.blocks_to_copy):
        if len(pairs.sources) or len(pairs.destinations):
            return False
    if len(step.num_new_tokens) != len(places) or np.count_nonzero(step.num_new_tokens != 1):
        return False
    if len(step.max_draft_tokens) not in (0, len(places)):
        return False
    appended = step.appended_sequence_ids
    return len(appended) == len(step.appended_block_ids) and all(each in places for each in appended)


def make_output(step: Step, answer: StepAnswer) -> StepOutput:
    """Makes the output of a step from the loop's answer."""
    counts, sequence_ids, skipped_ids = answer.counts, step.sequence_ids, ()
    if -1 in counts:
        skipped_ids = tuple(compress(sequence_ids, [each < 0 for each in counts]))
        sequence_ids = tuple(compress(sequence_ids, [each > 0 for each in counts]))
        counts = tuple(each for each in counts if each > 0)
    return StepOutput(
        step.epoch,
        step.step_id,
        sequence_ids,
        answer.token_ids,
        skipped_ids,
        times=StepTimes(
            queue_seconds=answer.queue_seconds,
            forward_seconds=answer.forward_seconds,
            sample_seconds=answer.sample_seconds,
            begun_at=answer.begun_at,
        ),
        num_tokens=counts if answer.num_drafts else (),
        num_draft_tokens=answer.num_drafts,
        num_accepted_tokens=len(answer.token_ids) - len(sequence_ids),
        predictions=tuple((step.sequence_ids[place], drafts, right) for place, drafts, right in answer.predictions),
    )
