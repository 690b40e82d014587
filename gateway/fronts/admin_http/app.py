"""Answers vLLM's HTTP calls for operators through AdminService: sleep and wake of replicas, and LoRA adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel

from blockyard.admin.v1 import admin_pb2
from blockyard.common.v1 import administration_pb2, status_pb2
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.lora.request import LONG_LORA
from gateway.fronts.openai.errors import error_response

if TYPE_CHECKING:
    from gateway.fronts.grpc_api.admin_servicer import AdminServicer


class LoadAdapter(BaseModel):
    lora_name: str
    lora_path: str
    load_inplace: bool = False
    long_lora_max_len: int | None = None


class UnloadAdapter(BaseModel):
    lora_name: str


def make_admin_app(administration: AdminServicer) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def answer_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, BlockyardError)
        return error_response(error)

    app.add_exception_handler(BlockyardError, answer_error)

    async def sleep(
        level: Annotated[int, Query(ge=1, le=2)] = 1,
        mode: Literal["keep", "wait", "abort"] = "keep",
        replica: str = "",
        model: str = "",
    ) -> Response:
        """Makes all replicas, or one, release their memory."""
        leave = admin_pb2.LeaveMode.Value(f"LEAVE_MODE_{mode.upper()}")
        for name in await _names(administration, model, replica):
            request = admin_pb2.SleepReplicaRequest(replica=name, level=level, mode=leave)
            await administration.pass_on("SleepReplica", request, model)
        return Response()

    async def wake_up(
        tags: Annotated[list[Literal["weights", "kv_cache"]] | None, Query()] = None,
        reload: bool = False,
        replica: str = "",
        model: str = "",
    ) -> Response:
        """Makes all replicas, or one, allocate their memory again."""
        numbers = [administration_pb2.MemoryTag.Value(f"MEMORY_TAG_{tag.upper()}") for tag in tags or ()]
        for name in await _names(administration, model, replica):
            request = admin_pb2.WakeReplicaRequest(replica=name, tags=numbers, reload=reload)
            await administration.pass_on("WakeReplica", request, model)
        return Response()

    async def is_sleeping(model: str = "") -> dict[str, Any]:
        """Returns whether all workers of all replicas are asleep."""
        replicas = await _replicas(administration, model)
        workers = [worker.state for replica in replicas for worker in replica.workers]
        return {"is_sleeping": bool(workers) and all(state == status_pb2.WORKER_STATE_SLEEPING for state in workers)}

    async def load_adapter(body: LoadAdapter, model: str = "") -> PlainTextResponse:
        """Loads an adapter on all replicas."""
        await administration.load_lora(_encode_load(body), model)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(body: UnloadAdapter, model: str = "") -> PlainTextResponse:
        """Unloads an adapter: new requests can no longer use it."""
        _require_unicode(lora_name=body.lora_name)
        await administration.unload_lora(admin_pb2.UnloadLoraRequest(name=body.lora_name), model)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    app.add_api_route("/v1/load_lora_adapter", load_adapter, methods=["POST"])
    app.add_api_route("/v1/unload_lora_adapter", unload_adapter, methods=["POST"])
    app.add_api_route("/sleep", sleep, methods=["POST"])
    app.add_api_route("/wake_up", wake_up, methods=["POST"])
    app.add_api_route("/is_sleeping", is_sleeping, methods=["GET"])
    return app


def _encode_load(body: LoadAdapter) -> admin_pb2.LoadLoraRequest:
    if body.long_lora_max_len:
        raise invalid([Violation("long_lora_max_len", LONG_LORA)])
    _require_unicode(lora_name=body.lora_name, lora_path=body.lora_path)
    return admin_pb2.LoadLoraRequest(name=body.lora_name, path=body.lora_path, load_inplace=body.load_inplace)


def _require_unicode(**texts: str) -> None:
    """Raises BlockyardError FIELD_INVALID for half a surrogate pair: JSON allows it, protobuf messages do not."""
    for name, text in texts.items():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise invalid([Violation(name, "must be Unicode text")]) from None


async def _replicas(administration: AdminServicer, model: str) -> list[status_pb2.ReplicaStatus]:
    status = await administration.status(model)
    if not status.HasField("scheduler"):
        raise BlockyardError(Reason.NO_READY_WORKER, status.gateway.message)
    return list(status.scheduler.replicas)


async def _names(administration: AdminServicer, model: str, replica: str) -> list[str]:
    return [replica] if replica else [str(each.replica_id) for each in await _replicas(administration, model)]
