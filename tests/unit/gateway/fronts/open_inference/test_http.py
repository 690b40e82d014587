"""The protocol over HTTP, beside the same requests over gRPC, on a gateway's core in this process."""

from __future__ import annotations

import json
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from blockyard.errors import TABLE, BlockyardError, Reason
from blockyard.open_inference.v2 import open_inference_pb2 as messages
from blockyard.version import __version__
from gateway.fronts.open_inference.call import INPUTS, OUTPUTS
from gateway.live.live_requests import LiveRequests
from gateway.live.scheduler_link import SchedulerLink
from tests.kit.fakes.fake_scheduler import FakeScheduler, scripted
from tests.unit.gateway.fronts.open_inference.harness import (
    PROMPT,
    InferenceFront,
    infer,
    serving_inference,
    tensors,
    unpacked,
)
from tests.unit.gateway.fronts.openai.serving import serve_openai
from tests.unit.gateway.harness import END_TOKEN, demo_tokenizer, ids_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Json = dict[str, Any]
DEMO = "/v2/models/demo"
TEXT = " there was a wörld 😀."
FLAGS = [kind.flag for kind in OUTPUTS.values() if kind.flag]


@asynccontextmanager
async def serving_http(front: InferenceFront) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serve_openai(front.gateway.service) as url,
        httpx.AsyncClient(base_url=url, timeout=20, verify=False) as client,
    ):
        yield client


@pytest.fixture
async def http(front: InferenceFront) -> AsyncIterator[httpx.AsyncClient]:
    async with serving_http(front) as client:
        yield client


def tensor(name: str, *elements: str | bool) -> Json:
    datatype = "BOOL" if isinstance(elements[0], bool) else "BYTES"
    return {"name": name, "datatype": datatype, "shape": [len(elements)], "data": list(elements)}


def body(*prompts: str, **fields: Any) -> Json:
    return {"inputs": [tensor("text_input", *(prompts or (PROMPT,)))], **fields}


def error_of(response: httpx.Response, status: int) -> str:
    """Checks an error's form and its status, and returns its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    fields = response.json()
    assert fields.keys() == {"error"}
    return fields["error"]


def outputs_of(answer: Json) -> dict[str, list[Any]]:
    for output in answer["outputs"]:
        assert output["shape"] == [len(output["data"])]
        assert output["datatype"] == OUTPUTS[output["name"]].datatype
    return {output["name"]: output["data"] for output in answer["outputs"]}


def texts_of(elements: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The elements of a gRPC answer as JSON has them."""
    return {
        name: [item.decode() if isinstance(item, bytes) else pytest.approx(item) for item in items]
        for name, items in elements.items()
    }


def events_of(response: httpx.Response) -> list[Json]:
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(block.removeprefix("data: ")) for block in response.text.split("\n\n") if block]


# The server and its models.


async def test_a_ready_gateway_and_its_model_are_live_and_ready(http: httpx.AsyncClient) -> None:
    for path, told in (
        ("/v2/health/live", {"live": True}),
        ("/v2/health/ready", {"ready": True}),
        (f"{DEMO}/ready", {"name": "demo", "ready": True}),
        (f"{DEMO}/versions/1/ready", {"name": "demo", "ready": True}),
    ):
        response = await http.get(path)
        assert (response.status_code, response.json()) == (200, told), path


async def test_a_gateway_without_a_worker_is_live_and_not_ready() -> None:
    async with (
        FakeScheduler(ready=False) as scheduler,
        serving_inference(scheduler) as front,
        serving_http(front) as http,
    ):
        assert (await http.get("/v2/health/live")).status_code == 200
        for path in ("/v2/health/ready", f"{DEMO}/ready"):
            response = await http.get(path)
            assert error_of(response, 503).startswith("NO_READY_WORKER: ")
            assert response.headers["retry-after"] == "1"
        assert (await http.get(DEMO)).status_code == 200


async def test_metadata_are_those_of_the_other_form(front: InferenceFront, http: httpx.AsyncClient) -> None:
    server = (await http.get("/v2")).json()
    assert (server["name"], server["version"]) == ("blockyard", __version__)
    assert server["extensions"] == ["parameters", "binary_tensor_data", "generate"]
    told = await front.stub.ModelMetadata(messages.ModelMetadataRequest(name="demo"))
    for path in (DEMO, f"{DEMO}/versions/1"):
        model = (await http.get(path)).json()
        assert (model["name"], model["versions"], model["platform"]) == ("demo", ["1"], "blockyard")
        for side in ("inputs", "outputs"):
            assert model[side] == [
                {"name": each.name, "datatype": each.datatype, "shape": list(each.shape)}
                for each in getattr(told, side)
            ]


@pytest.mark.parametrize("rest", ["", "/ready", "/versions/2", "/versions/2/ready"])
async def test_a_model_that_is_not_known_is_not_found(http: httpx.AsyncClient, rest: str) -> None:
    name = "demo" if "versions" in rest else "other"
    assert error_of(await http.get(f"/v2/models/{name}{rest}"), 404).startswith("MODEL_NOT_FOUND: ")


@pytest.mark.parametrize("call", ["infer", "generate", "generate_stream"])
async def test_a_model_that_is_not_known_answers_nothing(http: httpx.AsyncClient, call: str) -> None:
    asked = body() if call == "infer" else {"text_input": PROMPT}
    for path in (f"/v2/models/other/{call}", f"{DEMO}/versions/2/{call}"):
        assert error_of(await http.post(path, json=asked), 404).startswith("MODEL_NOT_FOUND: model_")


@pytest.mark.parametrize(("method", "path"), [("POST", f"{DEMO}/explain"), ("POST", "/v2/repository/index")])
async def test_calls_that_are_not_served_are_refused_by_name(http: httpx.AsyncClient, method: str, path: str) -> None:
    assert error_of(await http.request(method, path), 404) == f"{method} {path} is not served"


async def test_a_model_of_several_answers_under_its_name(front: InferenceFront, http: httpx.AsyncClient) -> None:
    async with FakeScheduler() as second:
        second.facts.model_digest = demo_tokenizer().model_digest
        link = SchedulerLink(second.address, gateway_id="g", model_digest=demo_tokenizer().model_digest)
        live = LiveRequests(link)
        front.gateway.service.add_model("org/two", demo_tokenizer(), link, live)
        link.start(live.on_progress, live.on_scheduler_lost)
        await link.wait_until(lambda: link.facts is not None)
        for name in ("demo", "org/two"):
            assert (await http.get(f"/v2/models/{name}/ready")).json() == {"name": name, "ready": True}
            assert (await http.get(f"/v2/models/{name}")).json()["name"] == name
            for call, asked in (("infer", body()), ("generate", {"text_input": PROMPT})):
                assert (await http.post(f"/v2/models/{name}/{call}", json=asked)).json()["model_name"] == name
        assert [len(scheduler.added) for scheduler in (front.scheduler, second)] == [2, 2]
        await link.stop()


# Inference.


async def test_an_answer_is_the_text_behind_its_prompt(front: InferenceFront, http: httpx.AsyncClient) -> None:
    front.scheduler.script = scripted(*ids_of(TEXT), END_TOKEN)
    asked = body(id="mine", parameters={"max_tokens": 50, "priority": 4})
    response = await http.post(f"{DEMO}/infer", json=asked, headers={"x-blockyard-tenant": "team"})
    assert response.headers["x-request-id"] == "mine"
    assert response.json() == {
        "id": "mine",
        "model_name": "demo",
        "model_version": "1",
        "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [1], "data": [PROMPT + TEXT]}],
    }
    (added,) = front.scheduler.added
    assert (added.request_id, added.tenant, added.priority) == ("team/mine", "team", 4)


async def test_each_output_is_that_of_the_other_form(front: InferenceFront, http: httpx.AsyncClient) -> None:
    sampling = {"max_tokens": 3, "n": 2, "seed": 3, "logprobs": 1}
    wanted = dict.fromkeys(("exclude_input_in_output", *FLAGS), True)
    told = await front.infer("one", "two of them", sampling=sampling, **wanted)
    inputs = [
        tensor("text_input", "one", "two of them"),
        tensor("sampling_parameters", json.dumps(sampling)),
        *(tensor(name, value) for name, value in wanted.items()),
    ]
    for asked in ({"inputs": inputs}, body("one", "two of them", parameters={**sampling, **wanted})):
        answer = (await http.post(f"{DEMO}/infer", json=asked)).json()
        assert outputs_of(answer) == texts_of(told)
    by_name = body("one", "two of them", parameters={**sampling, "exclude_input_in_output": True})
    by_name["outputs"] = [{"name": name} for name in reversed(OUTPUTS)]
    answer = (await http.post(f"{DEMO}/infer", json=by_name)).json()
    assert list(outputs_of(answer)) == list(reversed(OUTPUTS))
    assert outputs_of(answer) == texts_of(told)


async def test_elements_may_be_nested_as_their_shape_is(front: InferenceFront, http: httpx.AsyncClient) -> None:
    asked = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [2, 1], "data": [["a"], ["b"]]}]}
    assert (await http.post(f"{DEMO}/infer", json=asked)).status_code == 200
    assert len(front.scheduler.added) == 2


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"datatype": "FP32"}, "text_input: must be of type BYTES, not 'FP32'"),
        ({"shape": [2]}, "text_input: has the shape [2], and not as many elements"),
        ({"shape": [-1]}, "text_input: must have at most 8 dimensions, and none below 0"),
        ({"shape": [2**40]}, "text_input: must have at most 2048 elements"),
        ({"data": [1]}, "text_input: must have texts as data"),
        ({"data": [True]}, "text_input: must have texts as data"),
        ({"data": None}, "text_input: must have data, or the parameter binary_data_size"),
        ({"name": "prompt"}, "prompt: is not an input of this model"),
        ({"parameters": {"shared_memory_region": "a"}}, "text_input: has parameters, which are not supported"),
        ({"content": [1]}, "inputs[0].content: is not a parameter of this call"),
    ],
)
async def test_what_is_wrong_with_a_tensor_is_told(http: httpx.AsyncClient, changes: Json, told: str) -> None:
    asked = {"inputs": [{**tensor("text_input", PROMPT), **changes}]}
    assert told in error_of(await http.post(f"{DEMO}/infer", json=asked), 400)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (body(parameters={"top_p": 2, "n": 0}), "FIELD_INVALID: n: "),
        (body(parameters={"mood": "good"}), "FIELD_INVALID: mood: is not a parameter"),
        (body(parameters={"lora_name": "x"}), "UNSUPPORTED_PARAMETER: lora_name: "),
        (body(parameters={"stream": True}), "stream: must be false for infer; generate_stream streams"),
        (body(outputs=[{"name": "x"}]), "x: is not an output of this model"),
        (body(outputs=[{"name": "text_output", "parameters": {"classification": 2}}]), "text_output: has parameters"),
        ({"inputs": [tensor("text_input", "a"), tensor("text_input", "b")]}, "text_input: is given twice"),
        ({"inputs": [tensor("text_input", "a")] * 20}, f"inputs: must have at most {len(INPUTS)} tensors, not 20"),
        ({}, "inputs: is required"),
    ],
)
async def test_wrong_requests_are_refused_with_their_reasons(http: httpx.AsyncClient, asked: Json, told: str) -> None:
    assert told in error_of(await http.post(f"{DEMO}/infer", json=asked), 400)


async def test_a_body_of_another_type_is_refused(http: httpx.AsyncClient) -> None:
    for call in ("infer", "generate", "generate_stream"):
        response = await http.post(f"{DEMO}/{call}", content=b"{}", headers={"content-type": "text/plain"})
        assert "application/json" in error_of(response, 415)


@pytest.mark.parametrize("reason", [Reason.QUEUE_FULL, Reason.NO_READY_WORKER, Reason.BUG])
async def test_what_the_scheduler_refuses_has_its_status(
    front: InferenceFront, http: httpx.AsyncClient, reason: Reason
) -> None:
    front.scheduler.refusals["big"] = BlockyardError(reason, "come back", retry_after_seconds=2.0)
    for call, asked in (
        ("infer", body(id="big")),
        ("generate", {"text_input": "a", "id": "big"}),
        ("generate_stream", {"text_input": "a", "id": "big"}),
    ):
        response = await http.post(f"{DEMO}/{call}", json=asked)
        assert error_of(response, TABLE[reason].http_status) == f"{reason}: come back"
        assert response.headers["x-request-id"] == "big"
        assert response.headers["retry-after"] == "2"


async def test_a_call_whose_client_leaves_aborts_its_requests(front: InferenceFront, http: httpx.AsyncClient) -> None:
    front.scheduler.pause()
    for call in ("infer", "generate"):
        asked = body(id=call) if call == "infer" else {"text_input": PROMPT, "id": call}
        with pytest.raises(httpx.ReadTimeout):
            await http.post(f"{DEMO}/{call}", json=asked, timeout=httpx.Timeout(20, read=0.2))
        await front.scheduler.wait_until(lambda: not front.scheduler.live and bool(front.scheduler.aborted))
    assert [abort.request_id for abort in front.scheduler.aborted] == ["infer", "generate"]


# Binary data.


def packed(*texts: str) -> bytes:
    return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)


def binary_body(fields: Json, *pieces: bytes) -> tuple[bytes, dict[str, str]]:
    """A body as tritonclient makes it, and its headers: a content type is not among them."""
    head = json.dumps(fields).encode()
    return b"".join((head, *pieces)), {"inference-header-content-length": str(len(head))}


def binary_tensor(name: str, datatype: str, piece: bytes) -> Json:
    return {"name": name, "datatype": datatype, "shape": [1], "parameters": {"binary_data_size": len(piece)}}


async def test_elements_may_be_bytes_behind_the_json(front: InferenceFront, http: httpx.AsyncClient) -> None:
    wanted = dict.fromkeys(FLAGS, True)
    sampling = {"max_tokens": 3, "seed": 3}
    told = await front.infer(PROMPT, sampling=sampling, raw=True, **wanted)
    pieces = {"text_input": packed(PROMPT), "sampling_parameters": packed(json.dumps(sampling))}
    pieces |= dict.fromkeys(wanted, b"\1")
    inputs = [binary_tensor(name, INPUTS[name], piece) for name, piece in pieces.items()]
    fields = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    content, headers = binary_body(fields, *pieces.values())
    response = await http.post(f"{DEMO}/infer", content=content, headers=headers)
    assert response.headers["content-type"] == "application/octet-stream"
    length = int(response.headers["inference-header-content-length"])
    answer, rest = json.loads(response.content[:length]), response.content[length:]
    read: dict[str, list[Any]] = {}
    for output in answer["outputs"]:
        assert "data" not in output
        size = output["parameters"]["binary_data_size"]
        read[output["name"]], rest = unpacked(output["datatype"], rest[:size]), rest[size:]
    assert (read, rest) == (told, b"")


async def test_each_output_has_the_form_that_is_asked_of_it(http: httpx.AsyncClient) -> None:
    outputs = [
        {"name": "finish_reason"},
        {"name": "text_output", "parameters": {"binary_data": True}},
        {"name": "num_output_tokens", "parameters": {"binary_data": False}},
    ]
    for default in (True, False):
        asked = body(outputs=outputs, parameters={"max_tokens": 2, "binary_data_output": default})
        response = await http.post(f"{DEMO}/infer", json=asked)
        length = int(response.headers["inference-header-content-length"])
        answer = json.loads(response.content[:length])
        forms = {output["name"]: "data" in output for output in answer["outputs"]}
        assert forms == {"finish_reason": not default, "text_output": False, "num_output_tokens": True}


@pytest.mark.parametrize(
    ("size", "length", "told"),
    [
        (10**6, None, "text_input: has a binary_data_size that is no number of bytes which are left"),
        (-1, None, "text_input: has a binary_data_size"),
        ("5", None, "text_input: has a binary_data_size"),
        (3, None, "text_input: has contents that end within the length of an element"),
        (None, "x", "inference-header-content-length: must be a number of bytes"),
        (None, "-1", "inference-header-content-length: must be a number of bytes"),
        (None, "9" * 30, "inference-header-content-length: must be a number of bytes"),
        (None, "3", "body: "),
    ],
)
async def test_binary_bodies_that_do_not_fit_are_refused(
    http: httpx.AsyncClient, size: Any, length: str | None, told: str
) -> None:
    piece = packed(PROMPT)
    asked = binary_tensor("text_input", "BYTES", piece)
    if size is not None:
        asked["parameters"] = {"binary_data_size": size}
    content, headers = binary_body({"inputs": [asked]}, piece)
    if length is not None:
        headers["inference-header-content-length"] = length
    assert told in error_of(await http.post(f"{DEMO}/infer", content=content, headers=headers), 400)


async def test_bytes_that_no_tensor_has_are_refused(http: httpx.AsyncClient) -> None:
    content, headers = binary_body(body(), b"abc")
    told = error_of(await http.post(f"{DEMO}/infer", content=content, headers=headers), 400)
    assert told == "FIELD_INVALID: body: has 3 bytes more than its tensors"


# Generation.


async def test_a_generation_is_one_object(front: InferenceFront, http: httpx.AsyncClient) -> None:
    front.scheduler.script = scripted(*ids_of(TEXT), END_TOKEN)
    asked = {"text_input": PROMPT, "id": "mine", "parameters": {"max_tokens": 50, "return_finish_reason": True}}
    response = await http.post(f"{DEMO}/generate", json=asked)
    assert response.headers["x-request-id"] == "mine"
    assert response.json() == {
        "id": "mine",
        "model_name": "demo",
        "model_version": "1",
        "text_output": PROMPT + TEXT,
        "finish_reason": "stop",
    }


async def test_parameters_may_be_fields_of_the_body(front: InferenceFront, http: httpx.AsyncClient) -> None:
    asked = {"text_input": PROMPT, "max_tokens": 3, "seed": 5, "stop": ["\n"], "return_num_output_tokens": True}
    first = (await http.post(f"{DEMO}/generate", json=asked)).json()
    second = await http.post(
        f"{DEMO}/generate", json={"text_input": asked.pop("text_input"), "parameters": asked, "model": None}
    )
    assert "model: is not a sampling parameter here: use model_name" in error_of(second, 400)
    assert first["num_output_tokens"] == 3
    (added,) = front.scheduler.added
    assert (added.max_tokens, added.sampling.seed) == (3, 5)


async def test_choices_of_a_generation_are_a_list(http: httpx.AsyncClient) -> None:
    asked = {"text_input": PROMPT, "n": 2, "max_tokens": 2, "exclude_input_in_output": True, "seed": 1}
    answer = (await http.post(f"{DEMO}/generate", json=asked)).json()
    assert len(answer["text_output"]) == 2
    answer = (await http.post(f"{DEMO}/generate", json={"text_input": ["a", "b"], "max_tokens": 1})).json()
    assert [text[0] for text in answer["text_output"]] == ["a", "b"]


async def test_a_stream_has_an_event_for_what_is_new(front: InferenceFront, http: httpx.AsyncClient) -> None:
    front.scheduler.script = scripted(*ids_of(TEXT), END_TOKEN)
    asked = {"text_input": PROMPT, "max_tokens": 50, "return_finish_reason": True, "id": "mine"}
    response = await http.post(f"{DEMO}/generate_stream", json=asked)
    events = events_of(response)
    assert response.headers["x-request-id"] == "mine"
    assert "".join(event["text_output"] for event in events) == TEXT
    assert [event["finish_reason"] for event in events] == ["None"] * (len(events) - 1) + ["stop"]
    assert all(event["model_name"] == "demo" and event["id"] == "mine" for event in events)
    (whole,) = events_of(await http.post(f"{DEMO}/generate_stream", json=asked | {"stream": False, "id": "whole"}))
    assert whole["text_output"] == PROMPT + TEXT


async def test_a_stream_that_fails_ends_with_its_error(front: InferenceFront, http: httpx.AsyncClient) -> None:
    front.scheduler.pause()
    asked = {"text_input": PROMPT, "max_tokens": 50, "id": "mine"}
    async with http.stream("POST", f"{DEMO}/generate_stream", json=asked) as response:
        assert response.status_code == 200
        await front.scheduler.fail("mine", BlockyardError(Reason.POISON_REQUEST, "oh"))
        await response.aread()
    assert events_of(response)[-1] == {"error": "POISON_REQUEST: oh"}


@pytest.mark.parametrize(
    ("call", "fields", "told"),
    [
        ("generate", {"stream": True}, "stream: must be false for generate; generate_stream streams"),
        ("generate", {"text_input": 5}, "text_input: should be a string or a list of strings"),
        ("generate", {"text_input": []}, "text_input: "),
        ("generate", {"mood": 1}, "mood: is not a parameter"),
        ("generate_stream", {"parameters": {"top_p": 2}}, "top_p: must be"),
        ("generate_stream", {"text_input": ["a", "b"]}, "text_input: must hold one prompt"),
    ],
)
async def test_wrong_generations_are_refused(http: httpx.AsyncClient, call: str, fields: Json, told: str) -> None:
    response = await http.post(f"{DEMO}/{call}", json={"text_input": PROMPT, **fields})
    assert told in error_of(response, 400)


async def test_a_request_of_one_form_is_that_of_the_other(front: InferenceFront, http: httpx.AsyncClient) -> None:
    first = tensors(await front.stub.ModelInfer(infer(PROMPT, fields={"id": "mine", "model_name": "demo"})))
    answer = (await http.post(f"{DEMO}/infer", json=body(id="mine"))).json()
    assert outputs_of(answer) == texts_of(first)
    assert len(front.scheduler.added) == 1
