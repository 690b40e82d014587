"""Answers the scheduler's RPCs: passes what a gateway sends to admission, and writes what its outbox holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blockyard.contract.codec.messages import decode_seconds
from blockyard.contract.codec.progress import encode_progress
from blockyard.contract.codec.scheduling import decode_abort
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from blockyard.service.roots import start_task
from blockyard.telemetry import EventLogger
from scheduler_service.admin.status_codec import encode_status
from scheduler_service.gateways import codec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from scheduler_service.gateways.outbox import GatewayOutbox
    from scheduler_service.service import SchedulerService

log = EventLogger(__name__)


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """The scheduler, for gateways."""

    def __init__(self, service: SchedulerService) -> None:
        self._service = service
        self._admission = service.admission

    async def Attach(  # type: ignore[override]
        self, request_iterator: AsyncIterator[scheduler_pb2.AttachRequest], context: Any
    ) -> None:
        """One gateway's stream, until one side ends it."""
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        if first is None or not first.hello.gateway_id:
            raise invalid([Violation("hello.gateway_id", "must be in the first message")])
        # Before the gateway gets the list of adapters.
        self._service.loras.take_over(map(codec.decode_adapter, first.hello.loras))
        outbox = self._admission.attach(first.hello.gateway_id)
        self._admission.take_over_cancellations(
            (each.request_id, decode_seconds(each, "age") or 0.0) for each in first.hello.cancelled
        )
        outbox.put_state(loras=self._service.loras.registry.named)
        reader = start_task(self._read(outbox, first, requests), "gateway stream")
        try:
            while progress := await outbox.take():
                # Waits while the gateway is slow; meanwhile the results of steps merge in the outbox.
                await context.write(encode_progress(progress))
        finally:
            reader.cancel()
            self._admission.detach(outbox)

    async def _read(
        self,
        outbox: GatewayOutbox,
        first: scheduler_pb2.AttachRequest,
        requests: AsyncIterator[scheduler_pb2.AttachRequest],
    ) -> None:
        """Passes on the gateway's messages. Their end, or a failure here, ends the stream."""
        try:
            self._apply(outbox, first)
            async for message in requests:
                self._apply(outbox, message)
        except Exception:
            log.exception("a gateway's stream failed", gateway=outbox.owner)
            outbox.close(BlockyardError(Reason.BUG, "internal error; the scheduler's log has more"))
        else:
            outbox.close()

    def _apply(self, outbox: GatewayOutbox, message: scheduler_pb2.AttachRequest) -> None:
        for add in message.add:
            request_id = ""
            try:
                submission = codec.parse_submission(add.submission)
                request_id = submission.request_id
                addition = codec.decode_add(add, submission, outbox.owner)
                if addition.adapter:
                    self._service.loras.keep(addition.adapter)
                self._admission.add(outbox, addition)
            except BlockyardError as error:
                self._admission.refuse(outbox, request_id, add.handle, error)
        for abort in message.abort:
            self._admission.abort(outbox, decode_abort(abort))
        for resume in message.resume:
            self._admission.resume(outbox, resume.request_id, resume.handle)

    async def CancelRequests(self, request: scheduler_pb2.CancelRequestsRequest, context: Any) -> Any:
        """Ends requests, whoever reads them."""
        cancelled, pending = self._admission.cancel(request.request_ids)
        return scheduler_pb2.CancelRequestsResponse(cancelled_request_ids=cancelled, pending_request_ids=pending)

    async def GetSchedulerStatus(self, request: scheduler_pb2.GetSchedulerStatusRequest, context: Any) -> Any:
        return scheduler_pb2.GetSchedulerStatusResponse(status=encode_status(self._service))
