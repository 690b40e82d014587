"""Functions in namespaces: what the model is told of them, what the client is, and where their errors are."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from openai.types.responses import NamespaceTool, Response, ResponseFunctionToolCall

from blockyard.channels import PUBLIC_MESSAGE_BYTES
from blockyard.contract.chat import MAX_TOOLS, Conversation, Message, Tool, ToolCall
from blockyard.errors import BlockyardError, Reason
from gateway.fronts.http_calls.bodies import parse_body
from gateway.fronts.responses.call import understand, understand_count
from gateway.fronts.responses.schema import InputTokensBody, ResponseBody
from gateway.text.tokenizer_files import load_tokenizer
from tests.kit.fakes.fake_scheduler import FakeScheduler, scripted
from tests.unit.gateway.fronts.openai.serving import serve_openai
from tests.unit.gateway.fronts.parity.agents import TEMPLATE
from tests.unit.gateway.harness import DEMO_MODEL, END_OF_TURN, ids_of, serving

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "strict": False, "parameters": SCHEMA} | fields


def namespace(name: str, *tools: dict[str, Any], description: str = "") -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": description, "tools": [*tools]}


TOOLS = [
    function("read", description="Reads a file."),
    namespace("disk", function("read", description="Reads a sector."), function("list"), description="Of the disk."),
    function("close"),
    namespace("net", function("open", description="Connects.")),
]
# As Codex sends it, but for texts.
METADATA = {"thread_id": "0198", "x-codex-turn-metadata": '{"request_kind":"turn"}'}


def parsed(**fields: Any) -> ResponseBody:
    return parse_body(ResponseBody, json.dumps({"input": "Hi", "tools": TOOLS} | fields).encode())


def conversation_of(**fields: Any) -> Conversation:
    prompt = understand(parsed(**fields), "", 0).request.prompt
    assert isinstance(prompt, Conversation)
    return prompt


def wrong_with(**fields: Any) -> list[tuple[str, str]]:
    with pytest.raises(BlockyardError) as caught:
        understand(parsed(**fields), "", 0)
    return [(each.field, each.description) for each in caught.value.violations]


def test_the_model_knows_a_function_of_a_namespace_by_both_names() -> None:
    parameters = json.dumps(SCHEMA)
    assert conversation_of().tools == (
        Tool("read", "Reads a file.", parameters),
        Tool("disk__read", "Of the disk.\nReads a sector.", parameters),
        Tool("disk__list", "Of the disk.", parameters),
        Tool("close", "", parameters),
        Tool("net__open", "Connects.", parameters),
    )
    counted = parse_body(InputTokensBody, json.dumps({"input": "Hi", "tools": TOOLS}).encode())
    assert understand_count(counted, "").prompt == conversation_of()


def test_a_call_of_an_earlier_answer_has_the_name_that_the_model_knows() -> None:
    call = {"type": "function_call", "call_id": "c", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "1", "name": "read", "namespace": "disk"}
    items = [call | {"name": "read", "namespace": "disk"}, output, call | {"name": "read"}, call | {"name": "close"}]
    first, _, second = conversation_of(input=items).messages
    assert first.tool_calls == (ToolCall("disk__read", "{}", "c"),)
    assert isinstance(second, Message)
    assert second.tool_calls == (ToolCall("read", "{}", "c"), ToolCall("close", "{}", "c"))


@pytest.mark.parametrize(
    ("name", "named"),
    [("read", "read"), ("list", "disk__list"), ("disk__read", "disk__read"), ("open", "net__open"), ("?", "?")],
)
def test_a_choice_finds_a_function_in_its_namespace(name: str, named: str) -> None:
    assert conversation_of(tool_choice={"type": "function", "name": name}).named_tool == named


def test_a_choice_of_several_functions_is_wrong() -> None:
    tools = [namespace("a", function("f")), namespace("b", function("g"), function("f"))]
    wrong = wrong_with(tools=tools, tool_choice={"type": "function", "name": "f"})
    description = "'f' is the name of tools[0].tools[0] and of tools[1].tools[1]: give 'a__f' or 'b__f'"
    assert wrong == [("tool_choice", description)]


def test_functions_of_namespaces_may_be_all_that_is_allowed() -> None:
    allowed = [{"type": "function", "name": name} for name in ("list", "net__open", "read")]
    conversation = conversation_of(tool_choice={"type": "allowed_tools", "mode": "auto", "tools": allowed})
    assert conversation.allowed_tools == ("disk__list", "net__open", "read")


@pytest.mark.parametrize(
    ("tools", "place", "other"),
    [
        ([function("a__f"), namespace("a", function("f"))], "tools[1].tools[0]", "tools[0]"),
        ([namespace("a", function("f")), function("a__f")], "tools[1]", "tools[0].tools[0]"),
        ([namespace("a", function("f"), function("f"))], "tools[0].tools[1]", "tools[0].tools[0]"),
    ],
)
def test_two_functions_of_one_name_are_wrong(tools: list[Any], place: str, other: str) -> None:
    assert wrong_with(tools=tools) == [
        (f"{place}.name", f"is also the name of {other}: the model would know both as 'a__f'"),
    ]


def test_a_namespace_may_come_in_parts() -> None:
    tools = [namespace("a", function("f")), namespace("a", function("g")), namespace("b")]
    assert [tool.name for tool in conversation_of(tools=tools).tools] == ["a__f", "a__g"]


@pytest.mark.parametrize(
    ("tools", "named", "reason"),
    [
        ([namespace("a", {"type": "custom", "name": "f"})], "tools[0].tools[0]", Reason.UNSUPPORTED_PARAMETER),
        ([namespace("a", namespace("b"))], "tools[0].tools[0]", Reason.UNSUPPORTED_PARAMETER),
        ([{"type": "web_search"}], "tools[0]", Reason.UNSUPPORTED_PARAMETER),
        ([namespace("a", function("f", defer_loading=True))], "tools[0].tools[0].defer_loading", None),
        ([namespace("a", function("f", parameters=1))], "tools[0].tools[0].parameters", Reason.FIELD_INVALID),
        ([namespace("", function("f"))], "tools[0].name", Reason.FIELD_INVALID),
        ([{"name": "f"}], "tools[0]", Reason.FIELD_INVALID),
        ([namespace("a", *[function("f")] * MAX_TOOLS), function("f")], "", None),
        ([namespace("a", *[function("f")] * MAX_TOOLS), namespace("b", function("f"))], "tools", Reason.FIELD_INVALID),
    ],
)
def test_what_is_wrong_with_a_tool_has_its_place(tools: list[Any], named: str, reason: Reason | None) -> None:
    if not named:
        # One too many for the core, which counts them itself.
        assert len(parsed(tools=tools).tools or ()) == 2
        return
    with pytest.raises(BlockyardError) as caught:
        parsed(tools=tools)
    (violation,) = caught.value.violations
    assert (violation.field, violation.reason) == (named, reason or Reason.UNSUPPORTED_PARAMETER)


async def test_what_the_core_finds_has_its_place_too(http: httpx.AsyncClient) -> None:
    tools = [namespace("a", function("f"), function("")), function(""), namespace("b", function(""))]
    call = {"type": "function_call", "call_id": "c", "arguments": "{}", "name": "", "namespace": "a"}
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        refusal = await http.post(path, json={"input": [call], "tools": tools})
        assert refusal.status_code == 400
        violations = refusal.json()["error"]["violations"]
        assert [each["param"] for each in violations] == [
            "input[0].name",
            "tools[0].tools[1].name",
            "tools[1].name",
            "tools[2].tools[0].name",
        ]


async def test_what_a_client_says_of_itself_is_taken_and_not_told_again(client: openai.AsyncOpenAI) -> None:
    told = await client.responses.create(input="Hi", extra_body={"client_metadata": METADATA})
    assert "client_metadata" not in told.model_dump()


CALLS = "".join(
    f'<tool_call>{{"name": "{name}", "arguments": {{"path": "a"}}}}</tool_call>'
    for name in ("disk__read", "read", "net__open")
)
EXPECTED = [("read", "disk"), ("read", None), ("open", "net")]
ASKED: dict[str, Any] = {"model": "demo", "input": "Go.", "tools": TOOLS, "extra_body": {"client_metadata": METADATA}}


@asynccontextmanager
async def client_of(scheduler: FakeScheduler) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    """A client of a gateway of its own, whose model calls tools."""
    tokenizer = load_tokenizer(DEMO_MODEL, chat_template_file=TEMPLATE)
    async with (
        serving(scheduler, tokenizer=tokenizer) as front,
        serve_openai(front.service) as url,
        httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http,
    ):
        connection: Any = http
        yield openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=connection)


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    async with FakeScheduler(script=scripted(*ids_of(CALLS), then=END_OF_TURN)) as scheduler:
        yield scheduler


def calls_in(items: list[Any]) -> list[tuple[str, str | None]]:
    calls = [ResponseFunctionToolCall.model_validate(item.model_dump(exclude_unset=True)) for item in items]
    # Absent where there is none.
    assert [call.namespace is not None for call in calls] == ["namespace" in call.model_fields_set for call in calls]
    return [(call.name, call.namespace) for call in calls]


async def test_the_client_is_told_both_names_of_a_call(scheduler: FakeScheduler) -> None:
    async with client_of(scheduler) as client:
        raw = await client.responses.with_raw_response.create(**ASKED)
        whole: Any = raw.parse()
        events: list[Any] = [event async for event in await client.responses.create(**ASKED, stream=True)]
    Response.model_validate(json.loads(raw.content))
    assert calls_in(whole.output) == calls_in(events[-1].response.output) == EXPECTED
    for kind in ("added", "done"):
        items = [event.item for event in events if event.type == f"response.output_item.{kind}"]
        assert calls_in(items) == EXPECTED
    done = [event.name for event in events if event.type == "response.function_call_arguments.done"]
    assert done == [name for name, _ in EXPECTED]
    assert whole.tools[1] == NamespaceTool.model_validate(TOOLS[1])


async def test_a_schema_that_cannot_be_followed_has_its_place(scheduler: FakeScheduler) -> None:
    wrong = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"$ref": "http://a/b"}}}
    strict = function("f", strict=True, parameters=wrong)
    asked: dict[str, Any] = ASKED | {"tools": [function("g"), namespace("n", function("f"), strict | {"name": "h"})]}
    async with client_of(scheduler) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**asked)
        assert caught.value.param == "tools[1].tools[1].parameters.properties.b.$ref"
        # Of those that may be called.
        asked["tool_choice"] = {"type": "function", "name": "f"}
        assert (await client.responses.create(**asked)).status == "completed"
        asked["tools"] = [*asked["tools"], namespace("m", strict | {"name": "i"})]
        asked["tool_choice"] = {"type": "function", "name": "i"}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**asked)
        assert caught.value.param == "tools[2].tools[0].parameters.properties.b.$ref"


async def test_an_answer_goes_back_as_it_came(scheduler: FakeScheduler) -> None:
    async with client_of(scheduler) as client:
        whole: Any = await client.responses.create(**ASKED)
        items: list[Any] = [{"role": "user", "content": "Go."}]
        items += [item.model_dump(exclude_none=True) for item in whole.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "1"} for call in whole.output]
        asked: dict[str, Any] = ASKED | {"input": items}
        again: Any = await client.responses.create(**asked)
    assert again.status == "completed"


async def test_any_gateway_tells_both_names(scheduler: FakeScheduler) -> None:
    async with client_of(scheduler) as client, client_of(scheduler) as other:
        begun = await client.responses.create(**ASKED, background=True)
        events: list[Any] = [event async for event in await other.responses.retrieve(begun.id, stream=True)]
        told = await other.responses.retrieve(begun.id)
        assert told == events[-1].response == await client.responses.retrieve(begun.id)
    assert calls_in(told.output) == EXPECTED


def test_a_description_is_not_told_with_more_functions_than_memory_holds() -> None:
    functions = [function(f"f{number}", description="one of many") for number in range(20)]
    told = namespace("large", *functions, description="d" * (PUBLIC_MESSAGE_BYTES // 20 - len("large")))
    body = parse_body(ResponseBody, json.dumps({"input": "Hi", "tools": [told]}).encode())
    assert understand(body, "", 0)
    for name in ("name", "description"):
        told[name] += "d" * 20
        check_refused(told)
        told[name] = told[name][:-20]


def check_refused(told: dict[str, Any]) -> None:
    for kind, read in ((ResponseBody, lambda body: understand(body, "", 0)), (InputTokensBody, asked_to_count)):
        with pytest.raises(BlockyardError, match="tools: names and descriptions of namespaces") as raised:
            read(parse_body(kind, json.dumps({"input": "Hi", "tools": [told]}).encode()))
        assert raised.value.reason is Reason.FIELD_INVALID


def asked_to_count(body: InputTokensBody) -> Any:
    return understand_count(body, "")
