"""Bad input: a typed error that names every violation, the same on both fronts, and the system goes on."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from blockyard import BeamSearch, Client
from blockyard.errors import BlockyardError, Reason, from_rpc_error
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kit.processes.system import System

VOCAB_SIZE, MAX_MODEL_LEN = 4096, 1024


@dataclass(frozen=True)
class Case:
    """What is asked, by the client library's names, and what is told."""

    name: str
    asked: dict[str, Any]
    fields: tuple[str, ...]
    reason: Reason = Reason.FIELD_INVALID
    # Where OpenAI's name differs.
    params: tuple[str, ...] = ()
    prompt: Any = "x = 1\n"
    # Where HTTP asks in other words.
    body: dict[str, Any] | None = None


CASES = [
    Case("empty prompt", {}, ("prompt",), prompt=""),
    Case("too long a prompt", {}, ("prompt",), Reason.PROMPT_TOO_LONG, prompt=[5] * MAX_MODEL_LEN),
    Case("ids outside the vocabulary", {}, ("prompt",), prompt=[1, VOCAB_SIZE, 3]),
    Case("temperature", {"temperature": -0.5}, ("sampling.temperature",)),
    Case("top_p", {"top_p": 0.0}, ("sampling.top_p",)),
    Case("top_p above", {"top_p": 1.5}, ("sampling.top_p",)),
    Case("min_p", {"min_p": 1.01}, ("sampling.min_p",)),
    Case("presence_penalty", {"presence_penalty": 2.5}, ("sampling.presence_penalty",)),
    Case("frequency_penalty", {"frequency_penalty": -2.5}, ("sampling.frequency_penalty",)),
    Case("repetition_penalty", {"repetition_penalty": 0.0}, ("sampling.repetition_penalty",)),
    Case("logit_bias value", {"logit_bias": {5: 101.0}}, ("sampling.logit_bias",)),
    Case("logit_bias id", {"logit_bias": {VOCAB_SIZE: 1.0}}, ("sampling.logit_bias",)),
    Case("max_tokens", {"max_tokens": 0}, ("stop.max_tokens",)),
    Case("max_tokens above the length", {"max_tokens": MAX_MODEL_LEN}, ("stop.max_tokens",)),
    Case("min_tokens", {"max_tokens": 4, "min_tokens": 5}, ("stop.min_tokens",)),
    Case("stop string", {"stop": ["a", ""]}, ("stop.stop_strings",), params=("stop",)),
    Case("stop token id", {"stop_token_ids": [VOCAB_SIZE]}, ("stop.stop_token_ids",)),
    Case("n", {"n": 0}, ("n",)),
    Case("n above", {"n": 65}, ("n",)),
    Case("request_id", {"request_id": "two words"}, ("request_id",)),
    Case("model", {"model": "other"}, ("model",), Reason.MODEL_NOT_FOUND),
    Case(
        "everything at once",
        {"n": 0, "top_p": 2.0, "temperature": -1.0, "max_tokens": 0},
        ("n", "sampling.temperature", "sampling.top_p", "stop.max_tokens"),
    ),
    Case("logprobs", {"logprobs": 21}, ("sampling.logprobs",)),
    Case("prompt_logprobs", {"prompt_logprobs": 21}, ("sampling.prompt_logprobs",)),
    Case("allowed id", {"allowed_token_ids": [5, VOCAB_SIZE]}, ("sampling.allowed_token_ids",)),
    Case("no allowed id left", {"allowed_token_ids": [89], "bad_words": ["u"]}, ("sampling.allowed_token_ids",)),
    Case("empty bad word", {"bad_words": ["a", ""]}, ("sampling.bad_words",)),
    Case("long bad word", {"bad_words": ["a" * 257]}, ("sampling.bad_words",)),
    Case("many bad words", {"bad_words": ["a"] * 1025}, ("sampling.bad_words",)),
    Case("max_queue_time", {"max_queue_time": 0.0}, ("max_queue_time",)),
    Case("negative max_queue_time", {"max_queue_time": -1.5}, ("max_queue_time",)),
    Case(
        "beams, too few",
        {"beam_search": BeamSearch(1)},
        ("beam_search.width",),
        params=("best_of",),
        body={"use_beam_search": True},
    ),
    Case(
        "beams, too many",
        {"beam_search": BeamSearch(33), "n": 4},
        ("beam_search.width",),
        params=("best_of",),
        body={"use_beam_search": True, "best_of": 33, "n": 4},
    ),
    Case(
        "fewer beams than answers",
        {"beam_search": BeamSearch(2), "n": 3},
        ("n",),
        body={"use_beam_search": True, "best_of": 2, "n": 3},
    ),
    Case(
        "length_penalty",
        {"beam_search": BeamSearch(2, length_penalty=3e38 * 10), "n": 2},
        ("beam_search.length_penalty",),
        body={"use_beam_search": True, "n": 2, "length_penalty": 3e39},
    ),
    Case(
        "beams with many stop tokens",
        {"beam_search": BeamSearch(2), "n": 2, "stop_token_ids": list(range(33))},
        ("stop.stop_token_ids",),
        body={"use_beam_search": True, "n": 2, "stop_token_ids": list(range(33))},
    ),
    Case(
        "beams with a stop string and log probabilities",
        {"beam_search": BeamSearch(2), "n": 2, "stop": ["a"], "logprobs": 1},
        ("stop.stop_strings", "sampling.logprobs"),
        Reason.UNSUPPORTED_PARAMETER,
        params=("stop", "logprobs"),
        body={"use_beam_search": True, "n": 2, "stop": ["a"], "logprobs": 1},
    ),
]


@pytest.fixture(scope="module")
def client(demo: System) -> Iterator[Client]:
    with Client(demo.grpc_target) as client:
        yield client
        # Nothing was lost or left over by any of it.
        assert client.generate("x = 1\n", max_tokens=4).usage.num_completion_tokens


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_fronts_tell_the_same(case: Case, client: Client, demo: System) -> None:
    with pytest.raises(BlockyardError) as raised:
        client.generate(case.prompt, **case.asked)
    error = raised.value
    assert error.reason is case.reason
    assert tuple(violation.field for violation in error.violations) == case.fields

    asked = case.asked if case.body is None else case.body
    status, told = post(demo, "/v1/completions", {"prompt": case.prompt, "model": "demo", **asked})
    assert status == error.http_status
    assert told["reason"] == str(case.reason)
    expected = case.params or tuple(name.rpartition(".")[2] for name in case.fields)
    assert tuple(violation["param"] for violation in told["violations"]) == expected
    descriptions = [violation.description for violation in error.violations]
    assert [violation["message"] for violation in told["violations"]] == descriptions


def test_duplicate_request_id(client: Client, demo: System) -> None:
    stream = client.stream("x = 1\n", request_id="taken", max_tokens=900, ignore_eos=True)
    next(iter(stream))
    with pytest.raises(BlockyardError) as raised:
        client.generate("x = 1\n", request_id="taken", max_tokens=4)
    assert raised.value.reason is Reason.REQUEST_ID_CONFLICT
    status, told = post(demo, "/v1/completions", {"prompt": "x", "request_id": "taken"})
    assert (status, told["code"]) == (409, "REQUEST_ID_CONFLICT")
    stream.close()


def test_broken_utf8(demo: System, client: Client) -> None:
    good = inference_pb2.GenerateRequest(spec=inference_pb2.GenerationSpec(text="~~")).SerializeToString()
    with grpc.insecure_channel(demo.grpc_target) as channel:
        call = channel.unary_unary("/blockyard.inference.v1.InferenceService/Generate")
        with pytest.raises(grpc.RpcError) as raised:
            call(good.replace(b"~~", b"\xff\xfe"), timeout=10)
    assert from_rpc_error(raised.value).reason is Reason.FIELD_INVALID
    status, told = post(demo, "/v1/completions", b'{"prompt": "\xff\xfe"}')
    assert (status, told["code"]) == (400, "FIELD_INVALID")


def test_oversize_message(demo: System, client: Client) -> None:
    text = "x" * (16 * 2**20 + 1)
    with grpc.insecure_channel(demo.grpc_target, [("grpc.max_send_message_length", -1)]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            stub.Generate(inference_pb2.GenerateRequest(spec=inference_pb2.GenerationSpec(text=text)), timeout=30)
    assert from_rpc_error(raised.value).reason is Reason.MESSAGE_TOO_LARGE
    status, told = post(demo, "/v1/completions", {"prompt": text})
    assert told["code"] == "MESSAGE_TOO_LARGE"
    assert status == 413


def post(system: System, path: str, body: dict[str, Any] | bytes) -> tuple[int, dict[str, Any]]:
    """Posts a body and returns the status and the error."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(system.http_url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            raise AssertionError(f"it was taken: {answer.read()!r}")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())["error"]
