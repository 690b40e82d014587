"""Streams that run at once while something is done to the containers, each held against its undisturbed answer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from tests.kit.chaos.chaos_requests import TEXTS, ChaosRequest
from tests.kit.oracles.answers import read_answer
from tests.kit.oracles.transcript import Transcript, difference

if TYPE_CHECKING:
    from blockyard import AsyncClient
    from tests.kit.oracles.answers import Known

# As many as the demo model's length allows: long enough to be struck in their midst.
OPTIONS: Any = {"max_tokens": 960, "ignore_eos": True, "return_token_ids": True}


def make_requests(num_requests: int) -> list[ChaosRequest]:
    """Requests that each have an answer of their own."""
    return [
        ChaosRequest(number, "seeded", TEXTS[number % len(TEXTS)], {**OPTIONS, "seed": number})
        for number in range(num_requests)
    ]


@dataclass
class Streams:
    """Streams that run at once, each held against its undisturbed answer. Use as a context manager."""

    client: AsyncClient
    known: list[Known]
    name: str
    transcripts: list[Transcript] = field(default_factory=list)
    ended_at: float = 0.0

    async def __aenter__(self) -> Self:
        self.transcripts = [Transcript() for _ in self.known]
        self._reading = asyncio.gather(*(self._read(number) for number in range(len(self.known))))
        async with asyncio.timeout(60):
            while not all(transcript.num_tokens > 20 for transcript in self.transcripts):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not self._reading.done(), "they ended before they could be struck"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self, number: int) -> None:
        transcript = self.transcripts[number]
        await read_answer(self.client, self.known[number].request, f"{self.name}-{number}", transcript)

    async def differences(self) -> list[str]:
        """Waits until all streams end, and returns what differs from an undisturbed run."""
        await self._reading
        self.ended_at = time.time()
        pairs = zip(self.transcripts, self.known, strict=True)
        return [told for transcript, known in pairs if (told := difference(transcript, known.answer))]
