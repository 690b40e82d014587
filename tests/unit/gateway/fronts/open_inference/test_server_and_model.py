"""What probes and clients ask before they send requests."""

from __future__ import annotations

import pytest

from blockyard.errors import Reason
from blockyard.open_inference.v2 import open_inference_pb2 as messages
from blockyard.version import __version__
from gateway.fronts.open_inference.call import INPUTS
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.kit.refusals import refused
from tests.unit.gateway.fronts.open_inference.harness import InferenceFront, infer, serving_inference


async def model_is_ready(front: InferenceFront, **asked: str) -> bool:
    return (await front.stub.ModelReady(messages.ModelReadyRequest(**asked))).ready


async def test_a_ready_gateway_is_live_and_ready(front: InferenceFront) -> None:
    assert (await front.stub.ServerLive(messages.ServerLiveRequest())).live
    assert (await front.stub.ServerReady(messages.ServerReadyRequest())).ready
    assert await model_is_ready(front, name="demo")
    assert await model_is_ready(front, name="demo", version="1")
    assert await model_is_ready(front)


async def test_a_model_that_is_not_known_is_not_ready(front: InferenceFront) -> None:
    assert not await model_is_ready(front, name="other")
    assert not await model_is_ready(front, name="demo", version="2")


async def test_a_gateway_without_a_worker_is_live_and_not_ready() -> None:
    async with FakeScheduler(ready=False) as scheduler, serving_inference(scheduler) as front:
        assert (await front.stub.ServerLive(messages.ServerLiveRequest())).live
        assert not (await front.stub.ServerReady(messages.ServerReadyRequest())).ready
        assert not await model_is_ready(front, name="demo")
        assert (await front.stub.ModelMetadata(messages.ModelMetadataRequest(name="demo"))).name == "demo"


async def test_a_draining_gateway_is_not_ready(front: InferenceFront) -> None:
    front.gateway.service.start_draining()
    assert not (await front.stub.ServerReady(messages.ServerReadyRequest())).ready
    assert not await model_is_ready(front, name="demo")


async def test_without_a_scheduler_requests_are_refused(scheduler: FakeScheduler) -> None:
    await scheduler.stop()
    async with serving_inference(scheduler, attached=False) as front:
        error = await refused(front.stub.ModelInfer(infer("x")))
        assert error.reason is Reason.NO_READY_WORKER and error.retry_after_seconds
    await scheduler.start()


async def test_the_server_tells_its_version(front: InferenceFront) -> None:
    told = await front.stub.ServerMetadata(messages.ServerMetadataRequest())
    assert (told.name, told.version) == ("blockyard", __version__)


async def test_the_model_tells_its_tensors(front: InferenceFront) -> None:
    told = await front.stub.ModelMetadata(messages.ModelMetadataRequest(name="demo", version="1"))
    assert (told.name, list(told.versions), told.platform) == ("demo", ["1"], "blockyard")
    assert {tensor.name: tensor.datatype for tensor in told.inputs} == INPUTS
    shapes = {tensor.name: list(tensor.shape) for tensor in told.inputs}
    assert shapes.pop("text_input") == [-1]
    assert all(shape == [1] for shape in shapes.values())
    assert {tensor.name: tensor.datatype for tensor in told.outputs} == {
        "text_output": "BYTES",
        "finish_reason": "BYTES",
        "cumulative_logprob": "FP32",
        "logprobs": "BYTES",
        "num_input_tokens": "UINT32",
        "num_output_tokens": "UINT32",
    }


@pytest.mark.parametrize(("asked", "field"), [({"name": "other"}, "model"), ({"version": "2"}, "version")])
async def test_a_model_that_is_not_known_has_no_metadata(
    front: InferenceFront, asked: dict[str, str], field: str
) -> None:
    error = await refused(front.stub.ModelMetadata(messages.ModelMetadataRequest(**asked)))
    assert error.reason is Reason.MODEL_NOT_FOUND
    assert [violation.field for violation in error.violations] == [field]
