"""Answers `GET /status` with AdminService's GetStatusResponse, in protobuf's mapping to JSON.

Queries the status only for a client's request, and at most twice a second for all clients together.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from google.protobuf.message import Message

# An answer younger than this is reused.
MAX_AGE_SECONDS = 0.5


class StatusBoard:
    """Queries a status and reuses the answer for half a second."""

    def __init__(
        self, ask: Callable[[], Coroutine[Any, Any, Message]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Makes no query yet.

        Args:
            ask: returns the status.
            clock: a monotonic clock, in seconds.
        """
        self._ask = ask
        self._clock = clock
        self._asked_at = 0.0
        self._answer: asyncio.Task[bytes] | None = None

    async def encode(self) -> bytes:
        """Returns the status as JSON. Callers that come during a query wait for the same answer."""
        answer = self._answer
        if answer is None or (answer.done() and self._clock() - self._asked_at >= MAX_AGE_SECONDS):
            self._asked_at = self._clock()
            answer = self._answer = asyncio.create_task(self._make(), name="status")
        # A cancelled caller must not cancel the query for the other callers.
        return await asyncio.shield(answer)

    async def _make(self) -> bytes:
        fields = json_format.MessageToDict(
            await self._ask(), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        return json.dumps(fields).encode()
