"""The Open Inference Protocol on the real services: by raw gRPC, over HTTP, and by Triton's own clients."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import venv
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import httpx
import pytest

from blockyard import Client
from blockyard.errors import Reason, from_rpc_error
from blockyard.open_inference.v2 import open_inference_pb2 as messages
from blockyard.open_inference.v2 import open_inference_pb2_grpc
from tests.kit.processes.status import scheduler_status
from tests.kit.processes.system import ROOT
from tests.unit.gateway.fronts.open_inference.harness import infer, is_final, tensors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.kit.processes.system import System

PROMPT = "def read_lines(path):\n"
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture
async def stub(demo: System) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(demo.grpc_target) as channel:
        yield open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)


@pytest.fixture(scope="module")
def greedy(demo: System) -> dict[str, str]:
    """What the client library gets for the prompts."""
    with Client(demo.grpc_target) as client:
        prompts = (PROMPT, "x = 1\n", "import os\n")
        return {prompt: client.generate(prompt, temperature=0.0, max_tokens=24).text for prompt in prompts}


async def wait_until_idle(demo: System) -> None:
    """Waits until nothing runs or waits; polls the status, since idleness is no event."""
    async with asyncio.timeout(10):
        while True:
            status = await asyncio.to_thread(scheduler_status, demo)
            if not (status.num_waiting_requests or status.replicas[0].num_running_sequences):
                return
            await asyncio.sleep(0.05)


async def test_the_server_and_its_model_are_ready(stub: Any) -> None:
    assert (await stub.ServerLive(messages.ServerLiveRequest())).live
    assert (await stub.ServerReady(messages.ServerReadyRequest())).ready
    assert (await stub.ModelReady(messages.ModelReadyRequest(name="demo"))).ready
    assert (await stub.ModelMetadata(messages.ModelMetadataRequest(name="demo"))).inputs[0].name == "text_input"


@pytest.mark.parametrize("raw", [False, True])
async def test_prompts_have_the_answers_of_the_client_library(stub: Any, greedy: dict[str, str], raw: bool) -> None:
    request = infer(*greedy, sampling=GREEDY, raw=raw, exclude_input_in_output=True, return_num_output_tokens=True)
    told = tensors(await stub.ModelInfer(request))
    assert [text.decode() for text in told["text_output"]] == list(greedy.values())
    assert all(1 <= number <= 24 for number in told["num_output_tokens"])


async def test_streams_have_the_same_answers(stub: Any, greedy: dict[str, str]) -> None:
    requests = [infer(p, sampling=GREEDY, stream=True, fields={"id": f"oip-{n}"}) for n, p in enumerate(greedy)]
    pieces: dict[str, list[str]] = {}
    finals: list[str] = []
    async for response in stub.ModelStreamInfer(iter(requests)):
        assert not response.error_message
        told = response.infer_response
        pieces.setdefault(told.id, []).append(tensors(told)["text_output"][0].decode())
        finals += [told.id] * is_final(told)
    assert {name: "".join(texts) for name, texts in pieces.items()} == {
        f"oip-{number}": text for number, text in enumerate(greedy.values())
    }
    assert sorted(finals) == sorted(pieces)


async def test_errors_have_the_codes_of_the_table(stub: Any) -> None:
    async def refused(**asked: Any) -> tuple[Any, Reason, list[str]]:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.ModelInfer(infer(PROMPT, **asked))
        error = from_rpc_error(raised.value)
        return raised.value.code(), error.reason, [violation.field for violation in error.violations]

    invalid = grpc.StatusCode.INVALID_ARGUMENT
    assert await refused(sampling={"top_p": 2, "n": 0}) == (invalid, Reason.FIELD_INVALID, ["n", "top_p"])
    assert await refused(sampling={"lora_name": "x"}) == (invalid, Reason.UNSUPPORTED_PARAMETER, ["lora_name"])
    told = await refused(fields={"model_name": "other"})
    assert told == (grpc.StatusCode.NOT_FOUND, Reason.MODEL_NOT_FOUND, ["model_name"])


async def test_calls_that_are_cancelled_leave_nothing_behind(stub: Any, demo: System) -> None:
    endless = {"max_tokens": 900, "ignore_eos": True}
    whole = stub.ModelInfer(infer(*[PROMPT] * 4, sampling=endless))
    stream = stub.ModelStreamInfer()
    await stream.write(infer(PROMPT, sampling=endless, stream=True))
    assert not (await stream.read()).error_message
    whole.cancel()
    stream.cancel()
    await wait_until_idle(demo)


@pytest.fixture
def http(demo: System) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo.http_url, timeout=60) as client:
        yield client


def test_over_http_the_server_and_its_model_are_ready(http: httpx.Client) -> None:
    assert http.get("/v2/health/live").json() == {"live": True}
    assert http.get("/v2/health/ready").json() == {"ready": True}
    assert http.get("/v2/models/demo/ready").json() == {"name": "demo", "ready": True}
    assert http.get("/v2/models/demo").json()["inputs"][0]["name"] == "text_input"
    other = http.get("/v2/models/other/ready")
    assert (other.status_code, list(other.json())) == (404, ["error"])


def test_over_http_prompts_have_the_answers_of_the_client_library(http: httpx.Client, greedy: dict[str, str]) -> None:
    prompts = {"name": "text_input", "datatype": "BYTES", "shape": [len(greedy)], "data": list(greedy)}
    parameters = {**GREEDY, "exclude_input_in_output": True}
    answer = http.post("/v2/models/demo/infer", json={"inputs": [prompts], "parameters": parameters}).json()
    assert answer["outputs"][0]["data"] == list(greedy.values())
    for number, (prompt, text) in enumerate(greedy.items()):
        asked = {"text_input": prompt, "parameters": GREEDY, "id": f"generate-{number}"}
        assert http.post("/v2/models/demo/generate", json=asked).json()["text_output"] == prompt + text
        stream = http.post("/v2/models/demo/generate_stream", json=asked | {"id": f"stream-{number}"}).text
        events = [json.loads(event.removeprefix("data: ")) for event in stream.split("\n\n") if event]
        assert "".join(event["text_output"] for event in events) == text
        assert len(events) > 1


def test_over_http_errors_have_the_statuses_of_the_table(http: httpx.Client) -> None:
    for path, fields, status, told in (
        ("demo/generate", {"top_p": 2}, 400, "FIELD_INVALID: top_p: must be above 0"),
        ("demo/generate_stream", {"lora_name": "x"}, 400, "UNSUPPORTED_PARAMETER: lora_name: "),
        ("other/generate", {}, 404, "MODEL_NOT_FOUND: model_name: "),
    ):
        response = http.post(f"/v2/models/{path}", json={"text_input": PROMPT, **fields})
        assert response.status_code == status
        assert response.json()["error"].startswith(told)


async def test_over_http_a_stream_that_is_left_leaves_nothing_behind(demo: System) -> None:
    endless = {"text_input": PROMPT, "max_tokens": 900, "ignore_eos": True}
    async with (
        httpx.AsyncClient(base_url=demo.http_url, timeout=60) as http,
        http.stream("POST", "/v2/models/demo/generate_stream", json=endless) as response,
    ):
        assert "error" not in await anext(response.aiter_text())
    await wait_until_idle(demo)


def python_with(package: str, folder: Path) -> Path:
    """Makes an environment with a package in it, whose pins are not ours to keep."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", package], check=True, timeout=200)
    return python


@pytest.fixture(scope="module")
def triton_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return python_with("tritonclient[grpc,http]", tmp_path_factory.mktemp("tritonclient") / "environment")


def run(python: Path, *arguments: str) -> str:
    finished = subprocess.run([python, *arguments], capture_output=True, text=True, timeout=100, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def check_wire(theirs: dict[str, Any]) -> None:
    """What is written down here is as it is there; there is more of it."""
    (service,) = messages.DESCRIPTOR.services_by_name.values()
    for method in service.methods:
        assert theirs["calls"][method.name] == [method.input_type.full_name, method.output_type.full_name]
    known = list(messages.DESCRIPTOR.message_types_by_name.values())
    known += [nested for message in known for nested in message.nested_types]
    for message in known:
        fields = {field.name: [field.number, field.type] for field in message.fields}
        assert theirs["messages"][message.full_name] == fields


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_tritonclient(demo: System, greedy: dict[str, str], triton_python: Path) -> None:
    program = ROOT / "tests" / "integration" / "triton_client.py"
    told = json.loads(run(triton_python, str(program), demo.grpc_target, demo.http_url.removeprefix("http://"), PROMPT))
    check_wire(told.pop("wire"))
    assert told["server"] == {
        "live": True,
        "ready": True,
        "model_ready": True,
        "other_ready": False,
        "server": "blockyard",
        "outputs": [
            "text_output",
            "finish_reason",
            "cumulative_logprob",
            "logprobs",
            "num_input_tokens",
            "num_output_tokens",
        ],
    }
    assert (told["whole"]["id"], told["whole"]["texts"]) == ("whole", [greedy[PROMPT], greedy["x = 1\n"]])
    assert told["whole"]["finish_reasons"] and all(number > 0 for number in told["whole"]["num_output_tokens"])
    pieces = told["stream"]["pieces"]
    assert {name: "".join(texts) for name, texts in pieces.items()} == dict.fromkeys(pieces, greedy[PROMPT])
    assert len(told["stream"]["errors"]) == 1 and "text_input: must hold one prompt" in told["stream"]["errors"][0]
    assert told["refusal"]["status"] == "StatusCode.INVALID_ARGUMENT"
    assert told["refusal"]["message"].startswith("top_p: must be above 0")
    assert "".join(told["aio"]) == greedy[PROMPT]
    over_http = told["http"]
    assert {name: over_http[name] for name in told["server"]} == told["server"]
    assert over_http["texts"] == over_http["mixed"] == told["whole"]["texts"]
    assert (over_http["id"], over_http["num_output_tokens"]) == ("mixed", told["whole"]["num_output_tokens"])
    assert over_http["refusal"]["message"].startswith("FIELD_INVALID: top_p: must be above 0")
    assert over_http["refusal"]["status"] == "400"


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_the_programs_of_the_guide(demo: System, triton_python: Path, tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "guides" / "open-inference.md").read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert programs
    for number, program in enumerate(programs):
        file = tmp_path / f"program{number}.py"
        file.write_text(program.replace("127.0.0.1:50051", demo.grpc_target), encoding="utf-8")
        assert run(triton_python, str(file)).strip()
