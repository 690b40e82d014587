"""AttachRequest and operators' requests into the scheduler's servicers; unary requests into the worker's."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from blockyard.admin.v1 import admin_pb2
from blockyard.common.v1 import sampling_pb2
from blockyard.contract.codec.progress import encode_progress
from blockyard.contract.parallel import Parallel
from blockyard.contract.workers import CacheInfo, WorkerState
from blockyard.errors import BlockyardError, Reason
from blockyard.model_config.kv_groups import KvGroups
from blockyard.scheduler.v1 import scheduler_pb2
from blockyard.worker.v1 import worker_pb2
from scheduler_service.admin.servicer import AdminServicer
from scheduler_service.config import SchedulerConfiguration
from scheduler_service.gateways.codec import decode_adapter
from scheduler_service.server import Server
from scheduler_service.servicer import SchedulerServicer
from tests.kit.fakes.drafts import Draft
from tests.kit.fakes.fake_worker import FakeWorker, FakeWorkerOptions
from tests.kit.fuzz.gateway import Context
from tests.kit.fuzz.mutations import mutate
from worker_service.groups.joining import GroupSettings
from worker_service.groups.membership import Membership
from worker_service.servicer import WorkerServicer
from worker_service.set_up import DeviceChoice, SetUp
from worker_service.worker import Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from random import Random

    from google.protobuf.message import Message

    from scheduler_service.service import SchedulerService
    from tests.kit.fuzz.report import Report
    from worker_service.models.loader import RunnableModel


@asynccontextmanager
async def _scheduler() -> AsyncIterator[Server]:
    """A scheduler with a worker that answers hashes."""
    with tempfile.TemporaryDirectory(prefix="by") as folder:
        base = SchedulerConfiguration()
        service = replace(
            base.service, scheduler_address=f"unix:{folder}/scheduler", worker_address=f"unix:{folder}/worker"
        )
        lora = replace(base.lora, max_loras=2)
        configuration = replace(base, model=replace(base.model, model="fake"), service=service, lora=lora)
        async with FakeWorker(FakeWorkerOptions(), service.worker_address):
            server = Server(configuration)
            await server.start()
            try:
                async with asyncio.timeout(20):
                    while not server.service.is_ready:  # noqa: ASYNC110 - nobody tells
                        await asyncio.sleep(0.01)
                yield server
            finally:
                await server.stop()
                if server.error is not None:
                    raise server.error


def _add(number: int, rng: Random) -> scheduler_pb2.AttachRequest | None:
    """Makes a message of a gateway, in which one part is changed; None where the part is no message any more."""
    message = scheduler_pb2.AttachRequest(hello=scheduler_pb2.Hello(gateway_id="g"))
    draft = Draft(number, request_id=f"r{number % 50}", prompt_token_ids=[1, 2, 3], n=2, max_tokens=5, digest=b"d")
    submission = draft.submission
    draft.sampling.CopyFrom(sampling_pb2.SamplingParams(temperature=0.0, seed=3, prompt_logprobs=1))
    submission.stop_token_ids.append(99)
    submission.max_queue_time.seconds = submission.remaining_time.seconds = 5
    submission.fails_on_update, submission.computes_whole_prompt = number % 2 == 0, True
    lora = {"lora_id": 1 + number % 7, "name": f"a{number % 5}", "path": "/adapters/a", "digest": f"{number % 3:064x}"}
    message.hello.loras.add(**lora, num_virtual_tokens=2 * (number % 2))
    if number % 5 == 0:
        submission.lora.CopyFrom(message.hello.loras[0])
    if number % 3 == 0:
        submission.beam_search.width = 3
    if number % 4 == 0:
        draft.add.resubmission.age.seconds = 1
        for _ in range(2):
            draft.add.resubmission.sequences.add(token_ids=[4, 5])
    message.abort.add(request_id=f"r{(number + 25) % 50}", reason=scheduler_pb2.ABORT_REASON_STOP_STRING, num_tokens=1)
    message.resume.add(request_id=f"r{(number + 9) % 50}", handle=number + 10**6)
    part = rng.choice(("message", "submission", "sampling"))
    if part != "message":
        changed = mutate(getattr(draft, part), rng)
        if changed is None:
            return None
        setattr(draft, part, changed)
    message.add.append(draft.build())
    return mutate(message, rng) if part == "message" else message


async def fuzz_attach_requests(report: Report) -> None:
    """Messages of gateways, changed."""
    async with _scheduler() as server:
        service = server.service
        servicer = SchedulerServicer(service)
        outbox = service.admission.attach("fuzz")
        reader = asyncio.create_task(_drain(outbox))
        for number in range(report.num_cases):
            changed = _add(number, report.rng)
            if changed is None:
                report.outcomes["no message"] += 1
                continue
            with report.case():
                service.loras.take_over(map(decode_adapter, changed.hello.loras))
                servicer._apply(outbox, changed)
            if number % 16 == 0:
                await asyncio.sleep(0)
            if number % 50 == 49:
                _cancel_all(service)
        _cancel_all(service)
        reader.cancel()
        with report.case():
            epochs = [engine.replica.epoch for engine in service.engines]
            assert epochs == [1], f"a request ended an epoch: {epochs}"


async def _drain(outbox: Any) -> None:
    while progress := await outbox.take():
        encode_progress(progress).SerializeToString()


def _cancel_all(service: SchedulerService) -> None:
    service.admission.cancel(list(service.requests.live))


_OPERATIONS: dict[str, Message] = {
    "GetStatus": admin_pb2.GetStatusRequest(),
    "ResetPrefixCache": admin_pb2.ResetPrefixCacheRequest(replica="0"),
    "DumpState": admin_pb2.DumpStateRequest(max_requests=3),
    "DrainReplica": admin_pb2.DrainReplicaRequest(replica="0"),
    "UndrainReplica": admin_pb2.UndrainReplicaRequest(replica="0"),
    "SetLogLevel": admin_pb2.SetLogLevelRequest(process="scheduler", level=2),
    "StartProfile": admin_pb2.StartProfileRequest(replica="0"),
    "StopProfile": admin_pb2.StopProfileRequest(replica="0"),
}


async def fuzz_operations(report: Report) -> None:
    """Requests of operators, changed, and cancels of gateways."""
    async with _scheduler() as server:
        admin, scheduler = AdminServicer(server.service), SchedulerServicer(server.service)
        cancel = scheduler_pb2.CancelRequestsRequest(request_ids=["a", "b"])
        for number in range(report.num_cases):
            rpc, base = report.rng.choice([*_OPERATIONS.items(), ("CancelRequests", cancel)])
            changed: Any = mutate(base, report.rng)
            if changed is None:
                report.outcomes["no message"] += 1
                continue
            with report.case():
                await _take(getattr(scheduler if rpc == "CancelRequests" else admin, rpc)(changed, Context()))
            if number % 64 == 0:
                await asyncio.sleep(0)


async def _take(answer: Any) -> None:
    """Waits for an answer: a message, or a stream of them."""
    if hasattr(answer, "__aiter__"):
        async for _message in answer:
            pass
    else:
        await answer


class _NoDevice:
    """A device thread that runs nothing: what comes to it was taken."""

    async def run(self, work: object) -> Any:
        raise BlockyardError(Reason.NEVER_FITS, "there is no device here")


# The worker is the first of two.
_MEMBERS = ["this", "that"]
_LIFECYCLE: dict[str, tuple[WorkerState, Message]] = {
    "GetWorkerInfo": (WorkerState.CREATED, worker_pb2.GetWorkerInfoRequest()),
    "InitDevice": (
        WorkerState.CREATED,
        worker_pb2.InitDeviceRequest(
            device_type=worker_pb2.DEVICE_TYPE_CPU,
            configuration_digest="d",
            parallel=worker_pb2.Parallel(tensor_parallel_size=2, pipeline_parallel_size=1, rank=1),
        ),
    ),
    "OpenRendezvous": (WorkerState.DEVICE_READY, worker_pb2.OpenRendezvousRequest(epoch=1, members=_MEMBERS)),
    "SetRendezvousKey": (
        WorkerState.DEVICE_READY,
        worker_pb2.SetRendezvousKeyRequest(epoch=1, secret=b"0123456789abcdef", key="k", value=b"v"),
    ),
    "FormGroup": (
        WorkerState.DEVICE_READY,
        worker_pb2.FormGroupRequest(
            epoch=1,
            rendezvous_address="unix:/nowhere",
            secret=b"0123456789abcdef",
            members=_MEMBERS,
            timeout={"seconds": 1},
        ),
    ),
    "LeaveGroup": (WorkerState.DEVICE_READY, worker_pb2.LeaveGroupRequest(epoch=1, reason="over")),
    "LoadModel": (WorkerState.DEVICE_READY, worker_pb2.LoadModelRequest(model="/nowhere", revision="main")),
    "DetermineNumAvailableBlocks": (
        WorkerState.LOADED,
        worker_pb2.DetermineNumAvailableBlocksRequest(
            block_size=16, device_memory_utilization=0.5, max_num_batched_tokens=64, max_num_seqs=4
        ),
    ),
    "InitializeCache": (
        WorkerState.LOADED,
        worker_pb2.InitializeCacheRequest(
            block_size=16, num_device_blocks=9, max_model_len=64, max_num_batched_tokens=64, max_num_seqs=4
        ),
    ),
    "ChecksumBlocks": (WorkerState.CACHE_READY, worker_pb2.ChecksumBlocksRequest(device_block_ids=[1, 2])),
    "StartProfile": (WorkerState.LOADED, worker_pb2.StartProfileRequest()),
    "StopProfile": (WorkerState.LOADED, worker_pb2.StopProfileRequest()),
    "SetLogLevel": (WorkerState.CREATED, worker_pb2.SetLogLevelRequest(level=2)),
    "Shutdown": (WorkerState.CREATED, worker_pb2.ShutdownRequest(reason="over")),
}


async def fuzz_lifecycle(report: Report) -> None:
    """Unary requests of schedulers to a worker, changed: all of the worker but its device."""
    no_device: Any = _NoDevice()
    # A host of its own, so that no name is asked for.
    group = GroupSettings(host="127.0.0.1")
    worker = Worker(make_membership=lambda thread, incarnation: Membership(no_device, _MEMBERS[0], group))
    worker._thread = no_device
    servicer = WorkerServicer(worker, "fuzz", lambda: None)
    for _ in range(report.num_cases):
        rpc, (state, base) = report.rng.choice(list(_LIFECYCLE.items()))
        changed = mutate(base, report.rng)
        if changed is None:
            report.outcomes["no message"] += 1
            continue
        worker.set_up = _SET_UPS[state]
        with report.case():
            await _take(getattr(servicer, rpc)(changed, Context()))


class _Loaded:
    """What is left of a model: its length, and which tokens its layers keep."""

    class config:
        """Its configuration."""

        max_model_len = 2048

    class model:
        """Its network."""

        kv_groups = KvGroups.keep_all(1)


_CHOICE = DeviceChoice(torch.device("cpu"), None, 0, Parallel(2, 1, 0))
_LOADED = SetUp(choice=_CHOICE, loaded=cast("RunnableModel", _Loaded()))
_SET_UPS = {
    WorkerState.CREATED: SetUp(),
    WorkerState.DEVICE_READY: SetUp(choice=_CHOICE),
    WorkerState.LOADED: _LOADED,
    WorkerState.CACHE_READY: replace(_LOADED, cache=CacheInfo(16, 9, 0, 1, 64, "", True)),
}
