"""An admin port without a system: answers AdminService from a script, over a real socket, from threads.

Its one replica is drained some readings after it was told to, as a real one is after a while.
"""

from __future__ import annotations

import json
from concurrent import futures
from typing import TYPE_CHECKING, Any, Self

import grpc

from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.common.v1 import administration_pb2, status_pb2
from blockyard.contract.diagnostics import DIAGNOSTICS
from blockyard.errors import BlockyardError, to_call_status

if TYPE_CHECKING:
    from collections.abc import Iterator

READINGS_TO_DRAIN = 3


def make_status() -> admin_pb2.GetStatusResponse:
    """A gateway and a scheduler with one replica that does something."""
    status = admin_pb2.GetStatusResponse()
    gateway, scheduler = status.gateway, status.scheduler
    gateway.gateway_id, gateway.version, gateway.ready = "0123456789abcdef", "1.2.3", True
    gateway.num_requests, gateway.num_readers = 3, 2
    gateway.uptime.FromSeconds(3700)
    scheduler.version, scheduler.num_requests, scheduler.num_waiting_requests = "1.2.3", 1234, 1000
    scheduler.num_waiting_tokens, scheduler.num_gateways, scheduler.num_preemptions = 1_234_567, 2, 17
    scheduler.num_recoveries = 1
    scheduler.uptime.FromSeconds(100)
    replica = scheduler.replicas.add(ready=True, epoch=4, num_running_sequences=256, num_swapped_sequences=3)
    replica.device_blocks.num_blocks, replica.device_blocks.num_free_blocks = 1000, 250
    replica.host_blocks.num_blocks = replica.host_blocks.num_free_blocks = 100
    replica.workers.add(
        address="10.0.0.7:50070",
        worker_id="host/10.0.0.7:50070",
        incarnation="feedc0ffee",
        state=status_pb2.WORKER_STATE_RUNNING,
        device="NVIDIA H200",
        weights_bytes=3 << 30,
        device_cache_bytes=100 << 30,
        host_cache_bytes=1 << 30,
    )
    recovery = scheduler.recoveries.add(cause="the worker was lost", num_requests=5, num_replayed_tokens=4321)
    recovery.age.FromSeconds(75)
    return status


def make_lora(name: str, path: str) -> admin_pb2.LoraStatus:
    """An adapter at one replica, in a slot."""
    return admin_pb2.LoraStatus(
        name=name,
        lora_id=1,
        path=path,
        digest="0123456789abcdef" * 4,
        rank=16,
        num_bytes=50 << 20,
        loaded_replica_ids=[0],
        resident_replica_ids=[0],
    )


def advance(status: admin_pb2.GetStatusResponse, num_seconds: float = 1.0) -> None:
    """Lets a system work for a while: 1,000 tokens out and 400 steps a second, of which half the prompts are cached."""
    scheduler, gateway = status.scheduler, status.gateway
    scheduler.uptime.FromNanoseconds(scheduler.uptime.ToNanoseconds() + int(num_seconds * 1e9))
    scheduler.num_completion_tokens += int(1000 * num_seconds)
    scheduler.num_prompt_tokens += int(5000 * num_seconds)
    scheduler.num_cached_tokens += int(2500 * num_seconds)
    for replica in scheduler.replicas:
        replica.num_steps += int(400 * num_seconds)
        replica.num_completion_tokens += int(1000 * num_seconds)
        replica.step_time.FromNanoseconds(replica.step_time.ToNanoseconds() + int(0.8e9 * num_seconds))
    for totals, seconds in ((gateway.time_to_first_token, 0.042), (gateway.inter_token_latency, 0.0081)):
        totals.count += 10
        totals.sum.FromNanoseconds(totals.sum.ToNanoseconds() + int(10 * seconds * 1e9))


class FakeAdmin(admin_pb2_grpc.AdminServiceServicer):
    """`with FakeAdmin() as admin`: listens at `admin.address`.

    Attributes:
        status: what the next reading tells; it works on between readings.
        asked: every request but those for the status, with the metadata that came with the last.
        errors: by method, what it fails with.
        profile: the file of a profile.
        forgets_drains: as a scheduler that is restarted does.
        num_ranks: workers of the replica that operations are asked of.
    """

    def __init__(self) -> None:
        self.status = make_status()
        self.asked: list[Any] = []
        self.metadata: dict[str, str] = {}
        self.errors: dict[str, BlockyardError] = {}
        self.profile = b""
        self.forgets_drains = False
        self.loras: dict[str, admin_pb2.LoraStatus] = {}
        self.num_ranks = 1
        self.address = ""
        self._readings_to_drain: int | None = None
        self._server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, self._server)

    def __enter__(self) -> Self:
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Answers no more."""
        self._server.stop(0).wait()

    def _take(self, method: str, request: Any, context: Any) -> None:
        self.metadata = dict(context.invocation_metadata())
        if method != "GetStatus":
            self.asked.append(request)
        if error := self.errors.get(method):
            context.abort_with_status(to_call_status(error))

    def GetStatus(self, request: Any, context: Any) -> admin_pb2.GetStatusResponse:
        self._take("GetStatus", request, context)
        if self._readings_to_drain is not None:
            self._readings_to_drain -= 1
            if self._readings_to_drain == 0:
                self.status.gateway.num_readers = 0
                self.status.scheduler.replicas[0].drain_state = status_pb2.DRAIN_STATE_DRAINED
        told = admin_pb2.GetStatusResponse()
        told.CopyFrom(self.status)
        advance(self.status)
        return told

    def LoadLora(self, request: Any, context: Any) -> admin_pb2.LoadLoraResponse:
        self._take("LoadLora", request, context)
        self.loras[request.name] = make_lora(request.name, request.path)
        return admin_pb2.LoadLoraResponse(lora=self.loras[request.name])

    def UnloadLora(self, request: Any, context: Any) -> admin_pb2.UnloadLoraResponse:
        self._take("UnloadLora", request, context)
        self.loras.pop(request.name, None)
        return admin_pb2.UnloadLoraResponse()

    def PinLora(self, request: Any, context: Any) -> admin_pb2.PinLoraResponse:
        self._take("PinLora", request, context)
        self.loras[request.name].pinned = request.pinned
        return admin_pb2.PinLoraResponse(lora=self.loras[request.name])

    def ListLoras(self, request: Any, context: Any) -> admin_pb2.ListLorasResponse:
        self._take("ListLoras", request, context)
        return admin_pb2.ListLorasResponse(loras=self.loras.values())

    def ListMisses(self, request: Any, context: Any) -> admin_pb2.ListMissesResponse:
        self._take("ListMisses", request, context)
        return admin_pb2.ListMissesResponse(num_prompts=4, num_prompt_tokens=1000, num_cached_tokens=820)

    def DrainGateway(self, request: Any, context: Any) -> admin_pb2.DrainGatewayResponse:
        self._take("DrainGateway", request, context)
        self._readings_to_drain = READINGS_TO_DRAIN
        self.status.gateway.draining = True
        return admin_pb2.DrainGatewayResponse(gateway=self.status.gateway)

    def UndrainGateway(self, request: Any, context: Any) -> admin_pb2.UndrainGatewayResponse:
        self._take("UndrainGateway", request, context)
        return admin_pb2.UndrainGatewayResponse(gateway=self.status.gateway)

    def DrainReplica(self, request: Any, context: Any) -> admin_pb2.DrainReplicaResponse:
        self._take("DrainReplica", request, context)
        self._readings_to_drain = READINGS_TO_DRAIN
        replica = self.status.scheduler.replicas[0]
        replica.drain_state = status_pb2.DRAIN_STATE_DRAINING
        answer = admin_pb2.DrainReplicaResponse(replica=replica, hands_over=request.replica == "0")
        if self.forgets_drains:
            replica.drain_state = status_pb2.DRAIN_STATE_UNSPECIFIED
        return answer

    def UndrainReplica(self, request: Any, context: Any) -> admin_pb2.UndrainReplicaResponse:
        self._take("UndrainReplica", request, context)
        return admin_pb2.UndrainReplicaResponse(replica=self.status.scheduler.replicas[0])

    def SleepReplica(self, request: Any, context: Any) -> admin_pb2.SleepReplicaResponse:
        self._take("SleepReplica", request, context)
        replica = self.status.scheduler.replicas[0]
        return admin_pb2.SleepReplicaResponse(replica=replica, freed_bytes=1 << 30, used_bytes=2 << 20)

    def WakeReplica(self, request: Any, context: Any) -> admin_pb2.WakeReplicaResponse:
        self._take("WakeReplica", request, context)
        left = [administration_pb2.MEMORY_TAG_WEIGHTS] if request.tags else []
        return admin_pb2.WakeReplicaResponse(replica=self.status.scheduler.replicas[0], asleep_tags=left)

    def UpdateWeights(self, request: Any, context: Any) -> Iterator[admin_pb2.UpdateWeightsResponse]:
        self._take("UpdateWeights", request, context)
        for name in request.replicas or "0":
            updated = admin_pb2.UpdatedReplica(replica=self.status.scheduler.replicas[0])
            yield admin_pb2.UpdateWeightsResponse(replica_id=int(name), updated=updated)

    def ResetPrefixCache(self, request: Any, context: Any) -> admin_pb2.ResetPrefixCacheResponse:
        self._take("ResetPrefixCache", request, context)
        num_kept = 12 if not request.replica else 0
        reset = admin_pb2.PrefixCacheReset(num_forgotten_device_blocks=3456, num_kept_device_blocks=num_kept)
        return admin_pb2.ResetPrefixCacheResponse(replicas=[reset])

    def SetLogLevel(self, request: Any, context: Any) -> admin_pb2.SetLogLevelResponse:
        self._take("SetLogLevel", request, context)
        response = admin_pb2.SetLogLevelResponse()
        response.processes.add(process="gateway", previous_level=administration_pb2.LOG_LEVEL_INFO)
        if not request.process:
            response.processes.add(process="10.0.0.7:50070", message="the worker does not answer")
        return response

    def StartProfile(self, request: Any, context: Any) -> admin_pb2.StartProfileResponse:
        self._take("StartProfile", request, context)
        return admin_pb2.StartProfileResponse(options=request.options)

    def StopProfile(self, request: Any, context: Any) -> Iterator[admin_pb2.StopProfileResponse]:
        self._take("StopProfile", request, context)
        summary = administration_pb2.ProfileSummary(num_steps=1234, num_bytes=len(self.profile), worker="w feedc0ffee")
        yield admin_pb2.StopProfileResponse(summary=summary)
        for start in range(0, len(self.profile), 7):
            yield admin_pb2.StopProfileResponse(data=self.profile[start : start + 7])

    def DumpState(self, request: Any, context: Any) -> admin_pb2.DumpStateResponse:
        self._take("DumpState", request, context)
        state = admin_pb2.SchedulerState(num_requests=1, requests=[admin_pb2.RequestState(request_id="r1")])
        return admin_pb2.DumpStateResponse(state=state)

    def CallExtension(self, request: Any, context: Any) -> admin_pb2.CallExtensionResponse:
        self._take("CallExtension", request, context)
        response = admin_pb2.CallExtensionResponse()
        for rank in range(self.num_ranks):
            answer = b"%d %s" % (rank, request.payload)
            if request.extension == DIAGNOSTICS:
                answer = json.dumps({"text": f"LlamaForCausalLM {rank}"}).encode()
            response.results.add(rank=rank, address=f"10.0.0.{rank}:50070", result=answer)
        return response
