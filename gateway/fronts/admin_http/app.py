"""Answers `/sleep`, `/wake_up` and `/is_sleeping` as vLLM does, for all replicas, from AdminService."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response

from blockyard.admin.v1 import admin_pb2
from blockyard.common.v1 import administration_pb2, status_pb2
from blockyard.errors import BlockyardError, Reason
from gateway.fronts.openai.errors import error_response

if TYPE_CHECKING:
    from gateway.fronts.grpc_api.admin_servicer import AdminServicer


def make_admin_app(administration: AdminServicer) -> FastAPI:
    """Makes the application."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def answer_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, BlockyardError)
        return error_response(error)

    app.add_exception_handler(BlockyardError, answer_error)

    async def sleep(
        level: Annotated[int, Query(ge=1, le=2)] = 1,
        mode: Literal["keep", "wait", "abort"] = "keep",
        replica: str = "",
    ) -> Response:
        """Has all replicas, or one, give their memory up."""
        leave = admin_pb2.LeaveMode.Value(f"LEAVE_MODE_{mode.upper()}")
        for name in await _names(administration, replica):
            request = admin_pb2.SleepReplicaRequest(replica=name, level=level, mode=leave)
            await administration.SleepReplica(request, None)
        return Response()

    async def wake_up(
        tags: Annotated[list[Literal["weights", "kv_cache"]] | None, Query()] = None,
        reload: bool = False,
        replica: str = "",
    ) -> Response:
        """Has all replicas, or one, take their memory again."""
        numbers = [administration_pb2.MemoryTag.Value(f"MEMORY_TAG_{tag.upper()}") for tag in tags or ()]
        for name in await _names(administration, replica):
            request = admin_pb2.WakeReplicaRequest(replica=name, tags=numbers, reload=reload)
            await administration.WakeReplica(request, None)
        return Response()

    async def is_sleeping() -> dict[str, Any]:
        """Tells whether all replicas are asleep."""
        replicas = await _replicas(administration)
        workers = [worker.state for replica in replicas for worker in replica.workers]
        return {"is_sleeping": bool(workers) and all(state == status_pb2.WORKER_STATE_SLEEPING for state in workers)}

    app.add_api_route("/sleep", sleep, methods=["POST"])
    app.add_api_route("/wake_up", wake_up, methods=["POST"])
    app.add_api_route("/is_sleeping", is_sleeping, methods=["GET"])
    return app


async def _replicas(administration: AdminServicer) -> list[status_pb2.ReplicaStatus]:
    status = await administration.status()
    if not status.HasField("scheduler"):
        raise BlockyardError(Reason.NO_READY_WORKER, status.gateway.message)
    return list(status.scheduler.replicas)


async def _names(administration: AdminServicer, replica: str) -> list[str]:
    return [replica] if replica else [str(each.replica_id) for each in await _replicas(administration)]
