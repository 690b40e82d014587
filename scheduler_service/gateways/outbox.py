"""One gateway's stream, as the rest of the scheduler sees it: an outbox whose writers never block.

What cannot be sent yet merges: steps extend the columns of the waiting message, up to the limit of a message. Tokens of
short steps merge too: a message costs scheduler, gateway and client together a tenth of such a step or more, and no
client reads that fast. First tokens and ends never wait.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from typing import TYPE_CHECKING

from blockyard.channels import INTERNAL_MESSAGE_BYTES
from blockyard.contract.scheduling import Acceptance, Failure, Progress
from blockyard.errors import BlockyardError, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from blockyard.contract.sampling import PromptPiece
    from blockyard.contract.scheduling import Adapter, ModelFacts, Readiness, Recovery, Resumed, TokenUpdate


# Tokens that come sooner than this after a message wait for the tokens of the next step,
MERGE_SECONDS = 6e-3
# but no longer than this.
MAX_WAIT_SECONDS = 10e-3
# A message with more bytes of resumed requests, log probabilities and pooled numbers than this does not merge, so that
# it stays well below the limit of 64 MiB.
MAX_LARGE_BYTES = 8 * 2**20
# The most bytes of a token id; and of a candidate: an id, a log probability and a rank.
_ID_BYTES, _CANDIDATE_BYTES = 5, 12


class GatewayOutbox:
    """A gateway that is attached. `owner` is its name in the core, unique for each stream.

    `request_ids`: the live requests that it reads, by the handles that it gave them.
    """

    def __init__(self, owner: str, gateway_id: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.owner = owner
        self.gateway_id = gateway_id
        self._clock = clock
        self.request_ids: dict[int, str] = {}
        self._pending: deque[Progress] = deque()
        self._sealed = True
        self._num_large_bytes = 0  # in the message that still merges
        self._closed = False
        self._error: BlockyardError | None = None
        self._has_news = asyncio.Event()
        self._tokens_sent_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def _open(self, *, may_wait: bool = False) -> Progress:
        """Returns the message that still merges. It is sent at once unless it `may_wait` for more."""
        if may_wait:
            self._wait()
        else:
            self._has_news.set()
        if self._sealed:
            self._sealed, self._num_large_bytes = False, 0
            self._pending.append(Progress())
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
        progress = self._open()
        progress.facts = facts or progress.facts
        progress.readiness = readiness or progress.readiness
        progress.loras = progress.loras if loras is None else loras

    def put_accepted(self, request_id: str, first_sequence_id: int, handle: int = 0) -> None:
        self._open().accepted.append(Acceptance(handle, first_sequence_id, request_id))

    def put_failed(self, request_id: str, error: BlockyardError, handle: int = 0) -> None:
        self._open().failed.append(Failure(handle, error, request_id))

    def put_resumed(self, resumed: Resumed) -> None:
        """Adds a request with all that it has generated so far; raises MESSAGE_TOO_LARGE."""
        num_bytes = _count_resumed(resumed)
        if num_bytes > INTERNAL_MESSAGE_BYTES:
            # A message this large would break the stream, and with it all requests of the gateway.
            message = f"the request and its answer are larger than a message may be ({INTERNAL_MESSAGE_BYTES} bytes)"
            raise BlockyardError(Reason.MESSAGE_TOO_LARGE, message)
        self._sealed |= self._num_large_bytes + num_bytes > MAX_LARGE_BYTES
        self._open().resumed.append(resumed)
        self._count_large(num_bytes)

    def put_recovered(self, recoveries: list[Recovery]) -> None:
        """Adds the requests that go on after their worker was lost, in a message of their own after what waits."""
        self._sealed = True
        self._open().recovered += recoveries

    def put_weights(self, changes: list[tuple[str, str]]) -> None:
        """Adds (request_id, version) of requests that go on with other weights, after the tokens that wait."""
        self._sealed = True
        self._open().weights += changes

    def put_update(self, update: TokenUpdate) -> None:
        now = self._clock()
        may_wait = now - self._tokens_sent_at < MERGE_SECONDS and not (update.ended or update.prefilled)
        if not may_wait:
            self._tokens_sent_at = now
        merged = self._open(may_wait=may_wait).update
        merged.sequence_ids += update.sequence_ids
        merged.token_ids += update.token_ids
        merged.ended += update.ended
        merged.prefilled += update.prefilled
        merged.logprobs += update.logprobs
        merged.prompt_logprobs += update.prompt_logprobs
        merged.pooled += update.pooled
        merged.predictions += update.predictions
        if update.logprobs or update.prompt_logprobs or update.pooled:
            self._count_large(_count_update(update))

    def _count_large(self, num_bytes: int) -> None:
        self._num_large_bytes += num_bytes
        self._sealed = self._num_large_bytes > MAX_LARGE_BYTES

    def close(self, error: BlockyardError | None = None) -> None:
        """Ends the stream after the messages that wait, with an error if there is one."""
        self._closed, self._error = True, error
        self._has_news.set()

    async def take(self) -> Progress | None:
        """Waits for the next message; None once the stream has ended. Raises the error with which it was closed."""
        await self._has_news.wait()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pending:
            progress = self._pending.popleft()
            if not self._pending:
                self._sealed = True
                if not self._closed:
                    self._has_news.clear()
            return progress
        if self._error:
            raise self._error
        return None


def _count_update(update: TokenUpdate) -> int:
    """Estimates the bytes of the large parts of an update."""
    num_candidates = sum(len(entry.token_ids) for _, entry in update.logprobs)
    num_candidates += sum(_count_piece(piece) for _, piece in update.prompt_logprobs)
    return _CANDIDATE_BYTES * num_candidates + sum(len(values) for _, values in update.pooled)


def _count_piece(piece: PromptPiece) -> int:
    return sum(len(entry.token_ids) for entry in piece.candidates)


def _count_resumed(resumed: Resumed) -> int:
    """Estimates the bytes of a request with all that it has generated."""
    num_candidates = sum(map(_count_piece, resumed.prompt_logprobs))
    num_bytes = len(resumed.submission)
    for sequence in resumed.sequences:
        num_candidates += sum(len(entry.token_ids) for entry in sequence.logprobs)
        num_bytes += len(sequence.pooled_values) + _ID_BYTES * len(sequence.token_ids)
    return num_bytes + _CANDIDATE_BYTES * num_candidates
