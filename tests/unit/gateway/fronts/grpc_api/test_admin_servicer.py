"""The gateway's AdminService: its own status and drain, and what it passes on to the scheduler."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest

from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.common.v1 import administration_pb2
from blockyard.configuration import ModelSettings, PublicSettings
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from gateway.config import GatewayConfiguration, ServiceSettings
from gateway.server import Server
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.kit.refusals import refused
from tests.unit.gateway.harness import DEMO_MODEL, demo_tokenizer, spec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

DEBUG, INFO = administration_pb2.LOG_LEVEL_DEBUG, administration_pb2.LOG_LEVEL_INFO
PASSED_ON = {
    "DrainReplica": {"replica": "a"},
    "UndrainReplica": {"replica": "a"},
    "SleepReplica": {"replica": "a", "level": 2},
    "WakeReplica": {"replica": "a", "reload": True},
    "ResetPrefixCache": {"replica": "a"},
    "StartProfile": {"replica": "a", "options": administration_pb2.ProfileOptions(max_steps=3)},
    "CallExtension": {"replica": "a", "extension": "e", "operation": "o", "payload": b"p"},
    "DumpState": {"max_requests": 4},
    "LoadLora": {"name": "sql", "path": "/adapters/sql", "load_inplace": True},
    "UnloadLora": {"name": "sql"},
    "PinLora": {"name": "sql", "pinned": True},
    "ListLoras": {},
}


class Recorder(admin_pb2_grpc.AdminServiceServicer):
    """A scheduler's AdminService that keeps what it is asked, and answers it or says no."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.error: BlockyardError | None = None
        for method in PASSED_ON:
            setattr(self, method, self._answering(method))

    def _answering(self, method: str) -> Any:
        async def answer(request: Any, context: Any) -> Any:
            self.asked.append((method, request))
            if self.error:
                raise self.error
            return getattr(admin_pb2, f"{method}Response")()

        return answer

    async def SetLogLevel(self, request: admin_pb2.SetLogLevelRequest, context: Any) -> Any:
        self.asked.append(("SetLogLevel", request))
        return admin_pb2.SetLogLevelResponse(
            processes=[admin_pb2.ProcessLogLevel(process="scheduler", previous_level=INFO)]
        )

    async def StopProfile(self, request: admin_pb2.StopProfileRequest, context: Any) -> AsyncIterator[Any]:
        self.asked.append(("StopProfile", request))
        yield admin_pb2.StopProfileResponse(summary=administration_pb2.ProfileSummary(num_steps=7))
        yield admin_pb2.StopProfileResponse(data=b"one")
        if self.error:
            raise self.error
        yield admin_pb2.StopProfileResponse(data=b"two")

    async def SaveState(self, request: admin_pb2.SaveStateRequest, context: Any) -> AsyncIterator[Any]:
        self.asked.append(("SaveState", request))
        yield admin_pb2.SaveStateResponse(progress=admin_pb2.SaveProgress(done_bytes=3))
        yield admin_pb2.SaveStateResponse(workers=[administration_pb2.SavedState(folder=f"/root/{request.folder}")])


class System:
    """A gateway before a fake scheduler, and its operator."""

    def __init__(self, gateway: Server, scheduler: FakeScheduler, recorder: Recorder) -> None:
        self.gateway = gateway
        self.scheduler = scheduler
        self.recorder = recorder
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{gateway.admin_port}")
        self.admin: Any = admin_pb2_grpc.AdminServiceStub(self.channel)
        self.public = grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}")
        self.inference: Any = inference_pb2_grpc.InferenceServiceStub(self.public)

    async def status(self) -> admin_pb2.GatewayStatus:
        return (await self.admin.GetStatus(admin_pb2.GetStatusRequest())).gateway

    async def wait_until_ready(self) -> None:
        async with asyncio.timeout(10):
            while not (await self.status()).ready:  # noqa: ASYNC110 - what another service says
                await asyncio.sleep(0.01)


@pytest.fixture
async def system() -> AsyncIterator[System]:
    async with running_system() as system:
        yield system


@asynccontextmanager
async def running_system() -> AsyncIterator[System]:
    scheduler, recorder = FakeScheduler(model_digest=demo_tokenizer().model_digest), Recorder()
    scheduler.admin = recorder
    async with scheduler:
        gateway = Server(
            GatewayConfiguration(
                model=ModelSettings(model=str(DEMO_MODEL)),
                public=PublicSettings(grpc_port=0, http_port=0, admin_port=0),
                service=ServiceSettings(scheduler_address=scheduler.address),
            )
        )
        await gateway.start()
        system = System(gateway, scheduler, recorder)
        try:
            await system.wait_until_ready()
            yield system
        finally:
            await system.channel.close()
            await system.public.close()
            await gateway.stop()


async def test_status_measures_what_readers_saw(system: System) -> None:
    before = await system.status()
    assert (before.num_readers, before.time_to_first_token.count, before.draining) == (0, 0, False)
    request = inference_pb2.StreamGenerateRequest(spec=spec(max_tokens=12))
    async for _ in system.inference.StreamGenerate(request):
        pass
    now = await system.status()
    assert now.time_to_first_token.count == now.request_latency.count == 1
    assert now.request_latency.sum.ToNanoseconds() >= now.time_to_first_token.sum.ToNanoseconds() > 0
    assert now.inter_token_latency.count <= 11
    for told in (now.time_to_first_token, now.inter_token_latency, now.request_latency):
        assert len(told.bucket_counts) == len(told.bucket_ends) + 1
        assert sum(told.bucket_counts) == told.count
    assert now.uptime.ToNanoseconds() > before.uptime.ToNanoseconds() > 0


async def test_a_drained_gateway_is_not_ready_and_serves_on(system: System) -> None:
    for _ in range(2):
        answer = await system.admin.DrainGateway(admin_pb2.DrainGatewayRequest())
        assert (answer.gateway.draining, answer.gateway.ready) == (True, False)
        assert answer.gateway.message == "the gateway was drained"
    assert not system.gateway.generation.is_ready()
    served = await system.inference.Generate(inference_pb2.GenerateRequest(spec=spec(max_tokens=4)))
    assert served.choices
    answer = await system.admin.UndrainGateway(admin_pb2.UndrainGatewayRequest())
    assert (answer.gateway.draining, answer.gateway.ready, answer.gateway.message) == (False, True, "")


async def test_a_gateway_that_stops_is_not_taken_back(system: System) -> None:
    await system.admin.DrainGateway(admin_pb2.DrainGatewayRequest())
    system.gateway.generation.start_draining()
    error = await refused(system.admin.UndrainGateway(admin_pb2.UndrainGatewayRequest()))
    assert (error.reason, error.message) == (Reason.WRONG_STATE, "the gateway is stopping")
    # To drain it once more changes nothing.
    answer = await system.admin.DrainGateway(admin_pb2.DrainGatewayRequest())
    assert answer.gateway.message == "the gateway is stopping"


@pytest.mark.parametrize("method", PASSED_ON)
async def test_the_schedulers_part_is_passed_on_as_it_is(system: System, method: str) -> None:
    request = getattr(admin_pb2, f"{method}Request")(**PASSED_ON[method])
    await getattr(system.admin, method)(request)
    assert system.recorder.asked == [(method, request)]
    system.recorder.error = invalid([Violation("replica", "there is no such replica")])
    error = await refused(getattr(system.admin, method)(request))
    assert (error.reason, error.violations) == (Reason.FIELD_INVALID, system.recorder.error.violations)


async def test_every_method_is_answered_or_passed_on() -> None:
    methods = {method.name for method in admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods}
    own = {"GetStatus", "DrainGateway", "UndrainGateway", "ListMisses", "SetLogLevel"}
    own |= {"StopProfile", "SaveState", "UpdateWeights"}
    assert methods == own | PASSED_ON.keys()


async def test_a_profile_is_passed_on_as_it_comes(system: System) -> None:
    pieces = [piece async for piece in system.admin.StopProfile(admin_pb2.StopProfileRequest(replica="a"))]
    assert pieces[0].summary.num_steps == 7
    assert [piece.data for piece in pieces[1:]] == [b"one", b"two"]
    system.recorder.error = BlockyardError(Reason.NO_READY_WORKER, "the worker is gone")
    call = system.admin.StopProfile(admin_pb2.StopProfileRequest(replica="a"))
    assert (await call.read()).summary.num_steps == 7
    assert (await call.read()).data == b"one"
    error = await refused(call.read())
    assert (error.reason, error.message) == (Reason.NO_READY_WORKER, "the worker is gone")


async def test_a_save_is_passed_on_as_it_goes(system: System) -> None:
    request = admin_pb2.SaveStateRequest(replica="a", folder="it")
    progress, saved = [event async for event in system.admin.SaveState(request)]
    assert progress.progress.done_bytes == 3
    assert [worker.folder for worker in saved.workers] == ["/root/it"]
    assert system.recorder.asked == [("SaveState", request)]


async def test_log_levels_of_this_process_of_others_and_of_all(system: System) -> None:
    logging.getLogger("blockyard").setLevel("INFO")

    async def told(process: str) -> list[str]:
        request = admin_pb2.SetLogLevelRequest(level=DEBUG, process=process)
        return [each.process for each in (await system.admin.SetLogLevel(request)).processes]

    assert await told("gateway") == ["gateway"]
    assert logging.getLogger("gateway").level == logging.DEBUG
    assert system.recorder.asked == []
    assert await told("scheduler") == ["scheduler"]
    assert await told("") == ["gateway", "scheduler"]
    assert [request.process for _, request in system.recorder.asked] == ["scheduler", ""]
    error = await refused(system.admin.SetLogLevel(admin_pb2.SetLogLevelRequest(process="gateway")))
    assert error.violations[0].field == "level"


async def test_without_a_scheduler_only_the_gateways_part_is_answered(system: System) -> None:
    await system.scheduler.stop()
    error = await refused(system.admin.DrainReplica(admin_pb2.DrainReplicaRequest(replica="0")))
    assert error.reason is Reason.NO_READY_WORKER
    assert "the scheduler does not answer" in error.message
    answer = await system.admin.SetLogLevel(admin_pb2.SetLogLevelRequest(level=INFO))
    gateway, scheduler = answer.processes
    assert (gateway.message, scheduler.process) == ("", "scheduler")
    assert scheduler.message
    assert (await system.admin.DrainGateway(admin_pb2.DrainGatewayRequest())).gateway.draining
    await system.scheduler.start()


async def test_who_did_what_is_logged(system: System, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="gateway.fronts.grpc_api.admin_servicer"):
        await system.admin.DrainGateway(admin_pb2.DrainGatewayRequest())
        await system.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
        await system.status()
    told = [
        record.fields["method"] for record in caplog.records if record.name == "gateway.fronts.grpc_api.admin_servicer"
    ]  # type: ignore[attr-defined]
    assert told == ["DrainGateway", "ResetPrefixCache"]
