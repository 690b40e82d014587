"""Answers AdminService: how this gateway is, and what its scheduler says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from blockyard import __version__
from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc

if TYPE_CHECKING:
    from gateway.generation import GenerationService
    from gateway.scheduler_link import SchedulerLink

SERVICE_NAME = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
STATUS_TIMEOUT_SECONDS = 2.0


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """What an operator asks."""

    def __init__(self, generation: GenerationService, link: SchedulerLink, *, gateway_id: str) -> None:
        self._generation = generation
        self._link = link
        self._gateway_id = gateway_id

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers it."""
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, server)

    async def GetStatus(  # type: ignore[override]
        self, request: admin_pb2.GetStatusRequest, context: Any
    ) -> admin_pb2.GetStatusResponse:
        """Tells how things are; without the scheduler's part if that does not answer."""
        response = admin_pb2.GetStatusResponse(
            gateway=admin_pb2.GatewayStatus(
                gateway_id=self._gateway_id,
                version=__version__,
                ready=self._generation.is_ready(),
                message=self._generation.readiness_message,
                num_requests=self._generation.num_requests,
            )
        )
        try:
            response.scheduler.CopyFrom(await self._link.get_status(STATUS_TIMEOUT_SECONDS))
        except grpc.RpcError as error:
            response.gateway.message = response.gateway.message or f"the scheduler tells no status: {error}"
        return response
