"""Answers as they must be: each request run alone first, then held against the same one run among others.

Reads streams as a user of the client library does.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from unittest import mock

from blockyard.client import resumption
from blockyard.errors import BlockyardError
from tests.kit.oracles.transcript import Transcript, difference, read

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from blockyard import AsyncClient
    from blockyard.client.results import GenerationOptions
    from tests.kit.chaos.chaos_requests import ChaosRequest


@dataclass(frozen=True, slots=True)
class Known:
    """A request and its undisturbed answer."""

    request: ChaosRequest
    answer: Transcript

    async def check(self, client: AsyncClient, request_id: str) -> tuple[Transcript, str]:
        """Runs it again; gives what came, and in words what is wrong with it, or nothing."""
        transcript = Transcript()
        try:
            await read_answer(client, self.request, request_id, transcript)
        except (BlockyardError, AssertionError) as error:
            told = f"{type(error).__name__}: {error}"
        else:
            told = difference(transcript, self.answer)
        return transcript, told and f"{request_id} ({self.request.kind}): {told}"


async def read_answer(client: AsyncClient, request: ChaosRequest, request_id: str, transcript: Transcript) -> None:
    """Runs a request. Raises BlockyardError, and AssertionError where anything came twice or not at all."""
    options: GenerationOptions = {**request.options, "request_id": request_id}
    stream = client.stream(request.prompt, **options)
    try:
        await read(stream, transcript)
    finally:
        transcript.num_resumes = stream.num_resumes


async def run_alone(client: AsyncClient, requests: Iterable[ChaosRequest]) -> list[Known]:
    """Runs each request by itself, one after another, and chooses the stop strings from what comes."""
    return [await _run_alone(client, request) for request in requests]


async def check_all(client: AsyncClient, known: Iterable[Known], name: str) -> list[Transcript]:
    """Runs requests at a time. Raises AssertionError unless every answer is the undisturbed one."""
    checked = await asyncio.gather(*(one.check(client, f"{name}-{one.request.number}") for one in known))
    assert not [wrong for _, wrong in checked if wrong]
    return [transcript for transcript, _ in checked]


async def _run_alone(client: AsyncClient, request: ChaosRequest) -> Known:
    answer = Transcript()
    await read_answer(client, request, f"alone-{request.number}", answer)
    _check_alone(request, answer)
    if not request.stops:
        return Known(request, answer)
    text = answer.sequences[0].text
    stop = text[len(text) * 2 // 3 :][:4] or "no such text"
    stopping = replace(request, options={**request.options, "stop": stop}, stops=False)
    answer = Transcript()
    await read_answer(client, stopping, f"alone-{request.number}-stop", answer)
    _check_alone(stopping, answer)
    return Known(stopping, answer)


def _check_alone(request: ChaosRequest, answer: Transcript) -> None:
    """The undisturbed answer is the truth, but not if something that was asked for is missing everywhere."""
    assert len(answer.sequences) == request.options.get("n", 1)
    for sequence in answer.sequences.values():
        assert len(sequence.token_ids) > 0
        assert len(sequence.logprobs) == (len(sequence.token_ids) if "logprobs" in request.options else 0)


@contextmanager
def noted_losses() -> Generator[list[str]]:
    """Collects what the client library finds missing or doubled: it would read on without a word to its user."""
    losses: list[str] = []
    lost = resumption._lost

    def noting(message: str) -> resumption.EventsLost:
        losses.append(message)
        return lost(message)

    with mock.patch.object(resumption, "_lost", noting):
        yield losses
