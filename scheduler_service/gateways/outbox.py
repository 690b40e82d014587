"""One gateway's stream, as the rest of the scheduler sees it: an outbox that never blocks who writes to it.

What cannot be sent yet merges: steps extend the columns of the message that waits, bounded only by what is generated.
So do the tokens of short steps: what a message costs scheduler, gateway and client together is a tenth of such a step
and more, and nobody reads so fast. First tokens and ends never wait.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from typing import TYPE_CHECKING

from scheduler_service.gateways.messages import Accepted, Failed, Outgoing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.errors import BlockyardError
    from scheduler_service.core.values import OwnerUpdate
    from scheduler_service.gateways.messages import Recovery, Resumed
    from scheduler_service.replicas.facts import ModelFacts, Readiness
    from scheduler_service.replicas.loras.adapter import Adapter


# Tokens that come sooner after a message than this wait for those of the next step,
MERGE_SECONDS = 6e-3
# but if that takes longer than they did, no longer than this.
MAX_WAIT_SECONDS = 10e-3
# Numbers of prompts in a message do not merge with more, once they are so many.
MAX_POOLED_BYTES = 8 * 2**20


class GatewayOutbox:
    """A gateway that is attached. `owner` is its name in the core, unique for each stream.

    `request_ids`: the live requests that it reads, by the handles that it gave them.
    """

    def __init__(self, owner: str, gateway_id: str = "") -> None:
        self.owner = owner
        self.gateway_id = gateway_id
        self.request_ids: dict[int, str] = {}
        self._pending: deque[Outgoing] = deque()
        self._sealed = True
        self._closed = False
        self._error: BlockyardError | None = None
        self._has_news = asyncio.Event()
        self._tokens_sent_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def _open(self, *, may_wait: bool = False) -> Outgoing:
        """Returns the message that still merges. It is sent now, unless it `may_wait` for what comes next."""
        if may_wait:
            self._wait()
        else:
            self._has_news.set()
        if self._sealed:
            self._sealed = False
            self._pending.append(Outgoing())
        return self._pending[-1]

    def _wait(self) -> None:
        if self._timer is None and not self._has_news.is_set():
            self._timer = asyncio.get_running_loop().call_later(MAX_WAIT_SECONDS, self._stop_waiting)

    def _stop_waiting(self) -> None:
        self._timer = None
        if self._pending:
            self._has_news.set()

    def put_state(
        self,
        *,
        facts: ModelFacts | None = None,
        readiness: Readiness | None = None,
        loras: Sequence[Adapter] | None = None,
    ) -> None:
        """Sets what the model is, whether requests can be served, or which adapters they may have.

        Newer values replace those not sent yet.
        """
        outgoing = self._open()
        outgoing.facts = facts or outgoing.facts
        outgoing.readiness = readiness or outgoing.readiness
        outgoing.loras = outgoing.loras if loras is None else loras

    def put_accepted(self, request_id: str, first_sequence_id: int, handle: int = 0) -> None:
        """Adds that a request is queued."""
        self._open().accepted.append(Accepted(request_id, first_sequence_id, handle))

    def put_failed(self, request_id: str, error: BlockyardError, handle: int = 0) -> None:
        """Adds that a request ended with an error."""
        self._open().failed.append(Failed(request_id, error, handle))

    def put_resumed(self, resumed: Resumed) -> None:
        """Adds a request with all that it has generated so far."""
        self._open().resumed.append(resumed)

    def put_recovered(self, recoveries: list[Recovery]) -> None:
        """Adds the requests that go on after their worker was lost, in a message of their own after what waits."""
        self._sealed = True
        self._open().recovered += recoveries

    def put_weights(self, changes: list[tuple[str, str]]) -> None:
        """Adds (request_id, version) of requests that go on with other weights, after the tokens that wait."""
        self._sealed = True
        self._open().weights += changes

    def put_update(self, update: OwnerUpdate) -> None:
        """Merges what a step generated."""
        now = time.monotonic()
        may_wait = now - self._tokens_sent_at < MERGE_SECONDS and not (update.finished or update.prefilled)
        if not may_wait:
            self._tokens_sent_at = now
        merged = self._open(may_wait=may_wait).update
        merged.sequence_ids += update.sequence_ids
        merged.token_ids += update.token_ids
        merged.finished += update.finished
        merged.prefilled += update.prefilled
        merged.logprobs += update.logprobs
        merged.prompt_logprobs += update.prompt_logprobs
        if update.pooled:
            merged.pooled += update.pooled
            # A message has to stay below what a connection takes.
            self._sealed = sum(len(values) for _, values in merged.pooled) > MAX_POOLED_BYTES

    def close(self, error: BlockyardError | None = None) -> None:
        """Ends the stream after the messages that wait, with an error if there is one."""
        self._closed, self._error = True, error
        self._has_news.set()

    async def take(self) -> Outgoing | None:
        """Waits for the next message; None once the stream has ended. Raises the error with which it was closed."""
        await self._has_news.wait()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pending:
            outgoing = self._pending.popleft()
            if not self._pending:
                self._sealed = True
                if not self._closed:
                    self._has_news.clear()
            return outgoing
        if self._error:
            raise self._error
        return None
