"""Answers have the form that was asked for, over gRPC; what cannot have it fails alone."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import grpc
import openai
import pytest
from pydantic import BaseModel, Field

from blockyard import Client, StructuredOutputsParams
from blockyard.errors import Reason, from_rpc_error
from blockyard.inference.v1 import inference_pb2 as pb
from blockyard.inference.v1 import inference_pb2_grpc as rpcs
from tests.kit.oracles import grammar_answers
from tests.kit.oracles.schemas import SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kit.processes.system import System

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


class Person(BaseModel):
    """What a client asks for."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def stub(demo: System) -> Iterator[rpcs.InferenceServiceStub]:
    with grpc.insecure_channel(demo.grpc_target) as channel:
        yield rpcs.InferenceServiceStub(channel)


def make_spec(output: dict[str, Any] | None = None, n: int = 1, **sampling: Any) -> pb.GenerationSpec:
    spec = pb.GenerationSpec(text="Once", n=n, format=pb.OutputFormat(**output) if output else None)
    spec.sampling.MergeFrom(type(spec.sampling)(temperature=2, seed=3, **sampling))
    spec.stop.max_tokens = 80
    return spec


def ask(stub: rpcs.InferenceServiceStub, spec: pb.GenerationSpec) -> list[str]:
    return [choice.text for choice in stub.Generate(pb.GenerateRequest(spec=spec)).choices]


def refusal(stub: rpcs.InferenceServiceStub, spec: pb.GenerationSpec) -> Reason:
    with pytest.raises(grpc.RpcError) as raised:
        ask(stub, spec)
    return from_rpc_error(raised.value).reason


def test_answers_have_their_form(stub: rpcs.InferenceServiceStub) -> None:
    for compact in (False, True):
        schema = pb.JsonSchema(schema=PERSON, compact=compact)
        for text in ask(stub, make_spec({"json_schema": schema}, n=3)):
            assert set(json.loads(text)) == {"name", "age"}
            assert not compact or text.startswith('{"name":"')
    choices = make_spec({"choices": pb.Choices(texts=["yes", "no"])}, n=4)
    assert set(ask(stub, choices)) <= {"yes", "no"}
    assert ask(stub, make_spec(grammar='start: "a" "b"')) == ["ab"]


def test_clients_parse_what_they_ask_for(demo: System) -> None:
    with openai.OpenAI(base_url=f"{demo.http_url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.parse(
            model="demo",
            messages=[{"role": "user", "content": "Who?"}],
            response_format=Person,
            max_tokens=200,
            temperature=2,
            seed=1,
        )
        wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
        with pytest.raises(openai.BadRequestError) as raised:
            client.completions.create(model="demo", prompt="a", extra_body={"response_format": wrong})
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert raised.value.param == "response_format.json_schema.schema.not"
    with Client(demo.grpc_target) as client:
        form = StructuredOutputsParams(choice=["yes", "no"])
        assert client.generate("Well?", structured_outputs=form).text in ("yes", "no")


def test_an_end_wins_over_min_tokens(stub: rpcs.InferenceServiceStub) -> None:
    spec = make_spec({"regex": "[ab]{4}"})
    spec.stop.min_tokens = 12
    [choice] = stub.Generate(pb.GenerateRequest(spec=spec)).choices
    assert len(choice.text) == 4
    assert set(choice.text) <= {"a", "b"}


def test_a_grammar_that_cannot_go_on_fails_alone(stub: rpcs.InferenceServiceStub) -> None:
    forbidden = make_spec({"choices": pb.Choices(texts=["yes", "no"])}, allowed_token_ids=[300])
    pending = [stub.Generate.future(pb.GenerateRequest(spec=make_spec({"json_object": True}))) for _ in range(4)]
    assert refusal(stub, forbidden) is Reason.GRAMMAR_DEAD_END
    # What the gateway cannot know without the model's tokens.
    assert refusal(stub, make_spec(grammar='start: "a" x{100000}\nx: "a"')) is Reason.GRAMMAR_TOO_COMPLEX
    assert refusal(stub, make_spec(grammar='start: <no_such_token> "a"')) is Reason.FIELD_INVALID
    for each in pending:
        assert each.result().choices[0].text.startswith("{")


def test_what_goes_against_a_grammar_is_refused(stub: rpcs.InferenceServiceStub) -> None:
    beams, past_end, both = (make_spec({"json_object": True}) for _ in range(3))
    beams.beam_search.width = 2
    past_end.stop.ignore_eos = True
    both.sampling.grammar = 'start: "a"'
    assert refusal(stub, beams) is Reason.UNSUPPORTED_PARAMETER
    assert refusal(stub, past_end) is Reason.FIELD_INVALID
    assert refusal(stub, both) is Reason.FIELD_INVALID
    assert refusal(stub, make_spec({"json_object": False})) is Reason.FIELD_INVALID


def test_every_schema_is_kept_whatever_the_model_wants(demo: System) -> None:
    tally = asyncio.run(grammar_answers.ask(demo.grpc_target, 2 * len(SCHEMAS), vocab_size=4096))
    assert not tally.wrong
    assert tally.num_answers == 2 * len(SCHEMAS)
    assert tally.share_ended >= 0.6
