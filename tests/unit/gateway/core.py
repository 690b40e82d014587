"""The gateway's core with the test in place of the scheduler: it looks at what is sent, and writes what is told."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from blockyard.contract.codec.scheduling import encode_submission
from blockyard.contract.events import Accepted
from blockyard.contract.sampling import FinishReason
from blockyard.contract.scheduling import (
    Abort,
    Acceptance,
    Adapter,
    Add,
    Ending,
    Failure,
    ModelFacts,
    Progress,
    Resume,
    Resumed,
    SequenceRecord,
    Submission,
    TokenUpdate,
)
from blockyard.errors import BlockyardError, Reason
from gateway.generation import GenerationService
from gateway.live.live_requests import LiveRequests
from gateway.live.scheduler_link import Cancelled, Outgoing
from gateway.request import GenerationRequest, ResumeRequest
from tests.unit.gateway.harness import demo_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gateway.live.reader import Reader
    from gateway.observe.metrics import GatewayMetrics
    from gateway.text.tokenizer import Tokenizer

FACTS = ModelFacts("digest", 4096, 1024, 16, "id", True)


async def passed(seconds: float) -> None:
    """Lets time pass, where time is what is tested."""
    later = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(seconds, later.set_result, None)
    await later


def watch(metrics: GatewayMetrics, service: GenerationService, live: LiveRequests, link: Any) -> None:
    """Lets metrics read what a gateway's process lets them read."""
    metrics.watch(
        num_requests=lambda: live.num_running,
        num_readers=lambda: live.num_readers,
        is_attached=lambda: link.takes_requests,
        is_ready=lambda: service.is_ready(),
        models=service.models,
        num_waiting=lambda: {(model.name,): model.num_waiting_here for model in service.served_models},
    )


class HandLink:
    """A link whose other end is the test."""

    def __init__(self) -> None:
        self.facts: ModelFacts | None = FACTS
        self.loras: dict[str, Adapter] = {}
        self.is_ready = self.takes_requests = self.is_attached = True
        self.has_other_model = self.needs_repair = False
        self.message = ""
        self.sent: list[Outgoing] = []
        self.cancelled: list[str] = []
        self.runs_elsewhere: set[str] = set()
        self.not_heard_of: set[str] = set()
        self.unreachable: BlockyardError | None = None
        self.changed = asyncio.Event()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    def send(self, item: Outgoing) -> None:
        self.sent.append(item)

    async def cancel(self, request_ids: Sequence[str]) -> Cancelled:
        if self.unreachable is not None:
            raise self.unreachable
        self.cancelled.extend(request_ids)
        ran = [name for name in request_ids if name in self.runs_elsewhere]
        return Cancelled(ran, [name for name in request_ids if name in self.not_heard_of])

    @property
    def adds(self) -> list[Add]:
        return [item for item in self.sent if isinstance(item, Add)]

    @property
    def resumes(self) -> list[Resume]:
        return [item for item in self.sent if isinstance(item, Resume)]

    @property
    def aborts(self) -> list[Abort]:
        return [item for item in self.sent if isinstance(item, Abort)]


class Core:
    """The core of a gateway, driven by hand."""

    LENGTH = FinishReason.LENGTH

    def __init__(
        self,
        *,
        clamps_max_tokens: bool = False,
        max_requests: int = 0,
        lora_root: Path | None = None,
        tokenizer: Tokenizer | None = None,
        **windows: float,
    ) -> None:
        self.link = HandLink()
        self.live = LiveRequests(self.link, **windows)
        # The first sequence id of the request that was accepted last.
        self.first = 0
        self.service = GenerationService(max_requests=max_requests)
        self.service.add_model(
            "demo",
            tokenizer or demo_tokenizer(),
            self.link,
            self.live,
            seed=7,
            clamps_max_tokens=clamps_max_tokens,
            lora_root=lora_root,
        )

    async def start(self, request_id: str = "r", **fields: Any) -> Reader:
        return await self.service.start(GenerationRequest(**{"prompt": (5, 6), "request_id": request_id, **fields}))

    def told(self, **fields: Any) -> None:
        """Receives a message of the scheduler."""
        update = TokenUpdate(**{name: fields.pop(name) for name in TokenUpdate.__slots__ if name in fields})
        self.live.on_progress(Progress(update=update, **fields))

    def tokens(self, sequence_id: int, *token_ids: int, end: FinishReason | None = None) -> None:
        ended = [] if end is None else [Ending(sequence_id, end)]
        self.told(sequence_ids=[sequence_id] * len(token_ids), token_ids=list(token_ids), ended=ended)

    def attached(self, **facts: Any) -> None:
        """A scheduler has come."""
        self.link.facts, self.link.takes_requests = replace(FACTS, **facts), True
        self.told(facts=self.link.facts)

    def lost(self) -> None:
        """The scheduler is gone."""
        self.link.takes_requests = False
        self.live.on_scheduler_lost()

    async def accepted(self, request_id: str = "r", first: int = 10, **fields: Any) -> Reader:
        reader = await self.start(request_id, **fields)
        self.first = first
        self.told(accepted=[Acceptance(self.link.adds[-1].handle, first)])
        assert isinstance(await anext(reader), Accepted)
        return reader

    async def resume(self, request_id: str, *, replay: bool = False, **fields: Any) -> Reader:
        return await self.service.resume(ResumeRequest(request_id, **fields), replay=replay)

    async def submission_of(self, request_id: str) -> Submission:
        """What another gateway has sent of a request."""
        other = Core()
        await other.start(request_id)
        return other.link.adds[0].submission

    def resumed(self, handle: int, submission: Submission, token_ids: tuple[int, ...]) -> Resumed:
        """The scheduler's answer to a question; the sequence has the id 50."""
        return Resumed(handle, encode_submission(submission), 50, [SequenceRecord(token_ids)])

    def failure(self, handle: int, reason: Reason) -> Failure:
        return Failure(handle, BlockyardError(reason, "no"))

    def ending(self, sequence_id: int, *, score: float) -> Ending:
        return Ending(sequence_id, FinishReason.LENGTH, score)
