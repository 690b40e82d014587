"""Answers the scheduler's RPCs: reads what a gateway sends into the engine, writes what the engine has for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from blockyard.telemetry import EventLogger
from scheduler_service.admin.status import encode_status
from scheduler_service.gateways import codec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from scheduler_service.gateways.outbox import Attachment
    from scheduler_service.service import Scheduling

log = EventLogger(__name__)


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """The scheduler, for gateways."""

    def __init__(self, scheduling: Scheduling) -> None:
        self._scheduling = scheduling
        self._reception = scheduling.reception

    async def Attach(  # type: ignore[override]
        self, request_iterator: AsyncIterator[scheduler_pb2.AttachRequest], context: Any
    ) -> None:
        """One gateway's stream, until one side ends it."""
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        if first is None or not first.hello.gateway_id:
            raise invalid([Violation("hello.gateway_id", "must be in the first message")])
        attachment = self._reception.attach(first.hello.gateway_id)
        reader = asyncio.create_task(self._read(attachment, first, requests))
        try:
            while outgoing := await attachment.take():
                # Waits while the gateway is slow; what the steps give meanwhile merges in the attachment.
                await context.write(codec.encode_outgoing(outgoing))
        finally:
            reader.cancel()
            self._reception.detach(attachment)

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
            handle = add.handle
            try:
                self._reception.add(attachment, codec.decode_add(add, attachment.owner))
            except BlockyardError as error:
                self._reception.refuse(attachment, add.request_id, handle, error)
        for abort in message.abort:
            self._reception.abort(attachment, codec.decode_abort(abort))
        for resume in message.resume:
            self._reception.resume(attachment, resume.request_id, resume.handle)

    async def CancelRequests(  # type: ignore[override]
        self, request: scheduler_pb2.CancelRequestsRequest, context: Any
    ) -> scheduler_pb2.CancelRequestsResponse:
        """Ends requests, whoever reads them."""
        cancelled, pending = self._reception.cancel(request.request_ids)
        return scheduler_pb2.CancelRequestsResponse(cancelled_request_ids=cancelled, pending_request_ids=pending)

    async def GetSchedulerStatus(  # type: ignore[override]
        self, request: scheduler_pb2.GetSchedulerStatusRequest, context: Any
    ) -> scheduler_pb2.GetSchedulerStatusResponse:
        """Tells how things are."""
        return scheduler_pb2.GetSchedulerStatusResponse(status=encode_status(self._scheduling))
