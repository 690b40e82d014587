"""Runs the inputs of a pooling call as requests of one tenant, and collects their values. Knows no texts.

Each input is an ordinary request: it is queued, may be preempted, survives the loss of a worker or the scheduler, and
is found by its id if it is sent again. A call is answered completely: if one input fails, the others are cancelled.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from blockyard.contract.events import Accepted, Finished
from blockyard.contract.sampling import NUMBERS, SamplingParams, StopCriteria
from blockyard.contract.scheduling import Submission
from blockyard.errors import BlockyardError, Reason
from blockyard.telemetry import EventLogger
from gateway.codec import state as state_codec
from gateway.live.answer import AnswerRules, SequenceAnswer
from gateway.live.request_state import Origin, RequestState
from gateway.observe.request_log import RequestLog
from gateway.request import GenerationRequest, derive_cache_salt, wire_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.contract.pooling import Pooling
    from blockyard.contract.trace import TraceContext
    from gateway.live.live_requests import LiveRequests
    from gateway.live.reader import Reader
    from gateway.pooling_calls import CallOptions
    from gateway.text.tokenizer import Tokenizer

log = EventLogger(__name__)

WINDOW = 512
"""The most inputs of a call at the scheduler at once: enough for its largest steps, and few enough for other calls."""
_RULES = AnswerRules(StopCriteria(), frozenset(), frozenset(), return_token_ids=False)
_NEUTRAL: dict[str, Any] = {name: number.neutral for name, number in NUMBERS.items()}
_GREEDY = replace(SamplingParams(**_NEUTRAL), temperature=0.0, seed=0)


class Part(NamedTuple):
    """An input of a call: its token ids, and how to pool them."""

    token_ids: Sequence[int]
    pooling: Pooling


class PartResult(NamedTuple):
    """The result of an input. `values`: float32 numbers, little endian."""

    values: bytes
    num_prompt_tokens: int
    num_cached_tokens: int
    determinism_id: str


class Parts:
    """Runs pooling calls. A process has one object.

    Args:
        live: runs the requests.
        tokenizer: the model's tokenizer.
        model_name: the model's name in requests.
        shares_prefixes: whether tenants find each other's prefixes in the prefix cache.
    """

    def __init__(
        self, live: LiveRequests, tokenizer: Tokenizer, model_name: str, *, shares_prefixes: bool = False
    ) -> None:
        self._live = live
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._shares_prefixes = shares_prefixes
        # The readers of running calls, by the calls' ids on the wire.
        self._calls: dict[str, list[Reader]] = {}

    def cancel(self, wire_ids: Sequence[str]) -> list[str]:
        """Cancels the calls that run here, with all their inputs; returns the ids of these calls."""
        found = [name for name in wire_ids if name in self._calls]
        for name in found:
            self._live.cancel([reader.state.wire_id for reader in self._calls[name]])
        return found

    async def run(
        self, parts: Sequence[Part], options: CallOptions, determinism_id: str, context: TraceContext | None
    ) -> list[PartResult]:
        """Runs the parts of a call, and returns their results in order. `options` must have a request id.

        Raises the BlockyardError of the first part that fails, and cancels the others.
        """
        name = wire_id(options.tenant, options.request_id)
        readers = self._calls.setdefault(name, [])
        opened: deque[tuple[int, Reader]] = deque()
        results: list[PartResult] = []
        try:
            for place, part in enumerate(parts):
                if len(opened) == WINDOW:
                    results.append(await _finish(*opened.popleft()))
                reader = self._open(f"{name}-{place}", part, options, determinism_id, context)
                opened.append((place, reader))
                readers.append(reader)
            while opened:
                results.append(await _finish(*opened.popleft()))
        finally:
            for _, reader in opened:
                reader.close()
            del readers[: len(parts)]
            if not readers:
                self._calls.pop(name, None)
        return results

    def _open(
        self, name: str, part: Part, options: CallOptions, determinism_id: str, context: TraceContext | None
    ) -> Reader:
        """Begins a request, or reads the equal request that was sent before.

        Raises BlockyardError REQUEST_ID_CONFLICT if the id belongs to a different request.
        """
        salt = derive_cache_salt("" if self._shares_prefixes else options.tenant, "")
        submission = replace(_submit(name, part, options, context), cache_salt=salt)
        known = self._live.find(name)
        if known is not None and known.submission.digest != submission.digest:
            message = f"request_id {options.request_id!r} belongs to another request: choose another id"
            raise BlockyardError(Reason.REQUEST_ID_CONFLICT, message)
        state = known or self._make_state(submission, options, determinism_id)
        if known is None:
            self._live.open(state)
        reader = self._live.read(state, {})
        reader.be_patient()
        return reader

    def _make_state(self, submission: Submission, options: CallOptions, determinism_id: str) -> RequestState:
        now, remaining = asyncio.get_running_loop().time(), options.remaining_seconds
        accepted = Accepted(options.request_id, len(submission.prompt_token_ids), 0, self._model_name)
        return RequestState(
            submission,
            Origin(accepted, arrived_at=now, deadline_at=None if remaining is None else now + remaining),
            [SequenceAnswer(0, _RULES, self._tokenizer.make_detokenizer())],
            determinism_id=determinism_id,
            request_log=RequestLog(submission.request_id, is_part=True),
        )


def _submit(name: str, part: Part, options: CallOptions, context: TraceContext | None) -> Submission:
    submission = Submission(
        request_id=name,
        prompt_token_ids=array("I", part.token_ids),
        n=1,
        sampling=_GREEDY,
        max_tokens=0,
        min_tokens=0,
        stop_token_ids=(),
        tenant=options.tenant,
        priority=options.priority,
        max_queue_seconds=options.max_queue_seconds,
        remaining_seconds=options.remaining_seconds,
        pooling=part.pooling,
    )
    submission = state_codec.with_state(submission, GenerationRequest(prompt=(), request_id=options.request_id))
    return replace(submission, trace_context=context)


async def _finish(place: int, reader: Reader) -> PartResult:
    """Waits for the result of an input; raises a BlockyardError whose message names the input."""
    finished: Finished | None = None
    try:
        async for event in reader:
            if isinstance(event, Finished):
                finished = event
    except BlockyardError as error:
        if error.reason is Reason.CLIENT_CANCELLED:
            raise
        raise replace(error, message=f"inputs[{place}]: {error.message}") from None
    finally:
        reader.close()
    values = reader.state.ends[0].pooled_values
    assert finished is not None
    _check_values(place, values)
    return PartResult(
        values, finished.usage.num_prompt_tokens, finished.usage.num_cached_tokens, finished.determinism_id
    )


def _check_values(place: int, values: bytes) -> None:
    """Raises BlockyardError if there are no values, or one is not finite."""
    if not values:
        raise BlockyardError(Reason.BUG, f"inputs[{place}]: the answer ended without numbers")
    # A sum is not finite if one of its terms is not.
    if not math.isfinite(sum(read_values(values))):
        raise BlockyardError(Reason.NOT_FINITE, f"inputs[{place}]: the numbers of the answer are not finite")


def read_values(values: bytes) -> array[float]:
    """Reads float32 numbers, little endian."""
    return array("f", values)
