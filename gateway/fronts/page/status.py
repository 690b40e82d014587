"""Answers `GET /status` with AdminService's GetStatusResponse as JSON, as protobuf maps it.

Asks only when a client does, and at most twice a second however many clients ask.
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

# An answer younger than this is given again.
MAX_AGE_SECONDS = 0.5


class StatusBoard:
    """Asks for a status and keeps the answer for a moment."""

    def __init__(
        self, ask: Callable[[], Coroutine[Any, Any, Message]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Asks nothing yet.

        Args:
            ask: returns the status.
            clock: seconds that only grow.
        """
        self._ask = ask
        self._clock = clock
        self._asked_at = 0.0
        self._answer: asyncio.Task[bytes] | None = None

    async def encode(self) -> bytes:
        """Returns the status as JSON; callers that come while it is asked for wait for the same answer."""
        answer = self._answer
        if answer is None or (answer.done() and self._clock() - self._asked_at >= MAX_AGE_SECONDS):
            self._asked_at = self._clock()
            answer = self._answer = asyncio.create_task(self._make(), name="status")
        # When one of those who wait leaves, the others wait on.
        return await asyncio.shield(answer)

    async def _make(self) -> bytes:
        fields = json_format.MessageToDict(
            await self._ask(), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        return json.dumps(fields).encode()
