"""The requests of the fake scheduler: what each was asked, what it has given, and who reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blockyard.common.v1 import sampling_pb2
from blockyard.contract.scheduling import Submission
from blockyard.errors import from_status, to_status
from blockyard.scheduler.v1 import scheduler_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.errors import BlockyardError

# The token at a position of a sequence: (request, sequence index, position) -> id.
Script = Callable[[Submission, int, int], int]
Outbox = asyncio.Queue["scheduler_pb2.AttachResponse | BlockyardError | None"]


MAX_UNSENT = 4


@dataclass(eq=False)
class Gateway:
    """One that is attached. Its stream ends with None, or fails with an error."""

    gateway_id: str
    outbox: Outbox = field(default_factory=asyncio.Queue)
    has_room: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, message: scheduler_pb2.AttachResponse | BlockyardError | None) -> None:
        """Tells it something, behind all else that it was told."""
        self.outbox.put_nowait(message)

    async def get(self) -> scheduler_pb2.AttachResponse | BlockyardError | None:
        """Takes what it is told next."""
        message = await self.outbox.get()
        self.has_room.set()
        return message

    async def wait_for_room(self) -> None:
        """Waits until it takes what it is told."""
        while self.outbox.qsize() >= MAX_UNSENT:
            self.has_room.clear()
            await self.has_room.wait()


@dataclass
class StepColumns:
    """What one gateway is told of a step."""

    sequence_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prefilled: list[FakeRequest] = field(default_factory=list)
    ended: list[tuple[int, sampling_pb2.FinishReason]] = field(default_factory=list)
    failures: list[tuple[int, BlockyardError]] = field(default_factory=list)
    with_logprobs: list[tuple[int, int]] = field(default_factory=list)

    def message(self) -> scheduler_pb2.AttachResponse:
        """All of it."""
        return scheduler_pb2.AttachResponse(
            sequence_ids=self.sequence_ids,
            token_ids=self.token_ids,
            prefilled_sequence_ids=[request.first_sequence_id for request in self.prefilled],
            num_cached_tokens=[request.num_cached_tokens for request in self.prefilled],
            prompt_logprobs=[request.prompt_logprobs() for request in self.prefilled if request.tells_prompt],
            finished_sequence_ids=[sequence_id for sequence_id, _ in self.ended],
            finish_reasons=[reason for _, reason in self.ended],
            sequence_failures=[
                scheduler_pb2.SequenceFailure(sequence_id=sequence_id, status=to_status(error))
                for sequence_id, error in self.failures
            ],
            logprob_sequence_ids=[sequence_id for sequence_id, _ in self.with_logprobs],
            logprobs=logprobs_of([token_id for _, token_id in self.with_logprobs]),
        )


@dataclass(eq=False)
class FakeSequence:
    """What one sequence has given."""

    sequence_id: int
    index: int
    token_ids: list[int]
    reason: sampling_pb2.FinishReason | None = None
    error: BlockyardError | None = None

    def ends_by(self, message: Submission) -> sampling_pb2.FinishReason | None:
        """Returns whether its last token is its end."""
        if self.token_ids[-1] in message.stop_token_ids and len(self.token_ids) > message.min_tokens:
            return sampling_pb2.FINISH_REASON_STOP
        return sampling_pb2.FINISH_REASON_LENGTH if len(self.token_ids) == message.max_tokens else None


class FakeRequest:
    """A request; `message` is what was added, and `encoded` the bytes of it."""

    def __init__(self, add: scheduler_pb2.AddRequest, message: Submission, first_sequence_id: int) -> None:
        before = list(add.resubmission.sequences) or [scheduler_pb2.SequenceTranscript() for _ in range(message.n)]
        self.sequences = [
            FakeSequence(
                first_sequence_id + index,
                index,
                list(told.token_ids),
                told.finish_reason or None,
                from_status(told.error) if told.HasField("error") else None,
            )
            for index, told in enumerate(before)
        ]
        self.running = [sequence for sequence in self.sequences if sequence.reason is None]
        self.first_sequence_id = first_sequence_id
        self.readers: dict[Gateway, int] = {}
        self.num_cached_tokens = min(2, len(message.prompt_token_ids) - 1)
        self.message = message
        self.encoded = add.submission
        self.tells_logprobs = message.sampling.logprobs is not None
        self.tells_prompt = message.sampling.prompt_logprobs is not None

    @property
    def name(self) -> str:
        """Its request_id."""
        return self.message.request_id

    def prompt_logprobs(self) -> sampling_pb2.PromptLogprobs:
        """All of its prompt, in one piece."""
        told = logprobs_of(self.message.prompt_token_ids[1:])
        return sampling_pb2.PromptLogprobs(sequence_id=self.first_sequence_id, first_position=1, logprobs=told)

    def resumed(self, handle: int) -> scheduler_pb2.RequestResumed:
        """All that it has given."""
        told = scheduler_pb2.RequestResumed(
            handle=handle,
            submission=self.encoded,
            first_sequence_id=self.first_sequence_id,
            sequences=[self._transcript(sequence) for sequence in self.sequences],
            num_cached_tokens=self.num_cached_tokens,
        )
        if self.tells_prompt:
            told.prompt_logprobs.append(self.prompt_logprobs())
        return told

    def _transcript(self, sequence: FakeSequence) -> scheduler_pb2.SequenceTranscript:
        told = scheduler_pb2.SequenceTranscript(token_ids=sequence.token_ids, finish_reason=sequence.reason or 0)
        if self.tells_logprobs:
            told.logprobs.CopyFrom(logprobs_of(sequence.token_ids))
        if sequence.error is not None:
            told.error.CopyFrom(to_status(sequence.error))
        return told


def logprobs_of(token_ids: Sequence[int]) -> sampling_pb2.Logprobs:
    """For each token itself and one other, a function of its id."""
    return sampling_pb2.Logprobs(
        num_candidates=[2] * len(token_ids),
        token_ids=[each for token_id in token_ids for each in (token_id, 7)],
        logprobs=[each for token_id in token_ids for each in (-token_id / 1024, -0.5)],
        ranks=[each for _ in token_ids for each in (2, 1)],
    )


def failed(name: str, handle: int, error: BlockyardError) -> scheduler_pb2.AttachResponse:
    """Tells that a request has failed."""
    told = scheduler_pb2.RequestFailed(request_id=name, status=to_status(error), handle=handle)
    return scheduler_pb2.AttachResponse(failed=[told])
