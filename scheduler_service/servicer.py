"""Answers the scheduler's RPCs: reads what a gateway sends into the engine, writes what the engine has for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from blockyard.telemetry import EventLogger
from scheduler_service import gateway_codec as codec
from scheduler_service.status import encode_status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from scheduler_service.attachment import Attachment
    from scheduler_service.engine import Engine

log = EventLogger(__name__)


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """The scheduler, for gateways."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Attach(  # type: ignore[override]
        self, request_iterator: AsyncIterator[scheduler_pb2.AttachRequest], context: Any
    ) -> None:
        """One gateway's stream, until one side ends it."""
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        if first is None or not first.hello.gateway_id:
            raise invalid([Violation("hello.gateway_id", "must be in the first message")])
        attachment = self._engine.attach(first.hello.gateway_id)
        reader = asyncio.create_task(self._read(attachment, first, requests))
        try:
            while outgoing := await attachment.take():
                # Waits while the gateway is slow; what the steps give meanwhile merges in the attachment.
                await context.write(codec.encode_outgoing(outgoing))
        finally:
            reader.cancel()
            self._engine.detach(attachment)

    async def _read(
        self,
        attachment: Attachment,
        first: scheduler_pb2.AttachRequest,
        requests: AsyncIterator[scheduler_pb2.AttachRequest],
    ) -> None:
        """Passes on all that a gateway sends; its end, or a failure here, ends the stream."""
        try:
            self._apply(attachment, first)
            async for message in requests:
                self._apply(attachment, message)
        except Exception:
            log.exception("a gateway's stream failed", gateway=attachment.owner)
            attachment.close(BlockyardError(Reason.BUG, "internal error; the scheduler's log has more"))
        else:
            attachment.close()

    def _apply(self, attachment: Attachment, message: scheduler_pb2.AttachRequest) -> None:
        for add in message.add:
            try:
                self._engine.add(attachment, codec.decode_add(add, attachment.owner))
            except BlockyardError as error:
                self._engine.refuse(attachment, add.request_id, error)
        for abort in message.abort:
            self._engine.abort(attachment, codec.decode_abort(abort))

    async def GetSchedulerStatus(  # type: ignore[override]
        self, request: scheduler_pb2.GetSchedulerStatusRequest, context: Any
    ) -> scheduler_pb2.GetSchedulerStatusResponse:
        """Tells how things are."""
        return scheduler_pb2.GetSchedulerStatusResponse(status=encode_status(self._engine))
