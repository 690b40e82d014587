"""What is wrong with a format is told with its path, before a request is queued."""

from __future__ import annotations

import asyncio
import json
from threading import Event, Semaphore
from typing import Any

import pytest

from blockyard.contract.request import Choices, JsonObject, JsonSchema, Lark, OutputFormat, Regex
from blockyard.contract.sampling import SamplingParams
from blockyard.errors import BlockyardError, Reason
from blockyard.grammars.limits import MAX_CHOICES, MAX_GRAMMAR_BYTES, MAX_RULES, MAX_SCHEMA_BYTES, is_limit, mark_rules
from gateway.dialects.answer_parser import ParsingRule, ToolSchema
from gateway.dialects.dialect import AnswerContext
from gateway.dialects.table import BY_NAME
from gateway.grammars import checking, problems, tools
from gateway.grammars.checking import MAX_CHECKS, GrammarChecks
from gateway.grammars.compiling import compilers, lark_tokens
from gateway.grammars.expressions import expression_of
from gateway.grammars.problems import schema_text
from gateway.request import GenerationRequest

SCHEMA = "format.json_schema.schema"
# Of a keyword that is not served, anywhere in a schema, by its path.
UNSERVED = {
    "not": {},
    "if": {},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "uniqueItems": True,
    "contains": {},
    "minContains": 1,
    "maxContains": 1,
    "propertyNames": {},
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "$dynamicRef": "#a",
    "$recursiveRef": "#",
}


async def ask(output: OutputFormat | None = None, *, grammar: str = "", context: AnswerContext | None = None) -> str:
    checks = GrammarChecks()
    try:
        sampling = SamplingParams(grammar=grammar)
        return await checks.grammar_of(GenerationRequest("", format=output, sampling=sampling), context)
    finally:
        checks.close()


def schema(tree: Any) -> JsonSchema:
    return JsonSchema(json.dumps(tree))


def refusal(
    output: OutputFormat | None = None, *, grammar: str = "", context: AnswerContext | None = None
) -> tuple[Reason, str]:
    with pytest.raises(BlockyardError) as raised:
        asyncio.run(ask(output, grammar=grammar, context=context))
    assert raised.value.http_status == 400
    [violation] = raised.value.violations
    return violation.reason, violation.field


@pytest.mark.parametrize("keyword", UNSERVED)
def test_an_unserved_keyword_is_told_with_its_path(keyword: str) -> None:
    inner = {"type": "array", "items": {keyword: UNSERVED[keyword]}}
    tree = {"type": "object", "properties": {keyword: {"type": "string"}, "b": {"anyOf": [{"type": "null"}, inner]}}}
    assert refusal(schema(tree)) == (Reason.FIELD_INVALID, f"{SCHEMA}.properties.b.anyOf[1].items.{keyword}")


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"type": "string", "pattern": "a(?=b)"}, ".pattern"),
        ({"type": "string", "format": "no-such"}, ".format"),
        ({"type": "strnig"}, ".type"),
        ({"minLength": -1}, ".minLength"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 1}]}, ".oneOf"),
        ({"$ref": "#/$defs/no"}, ".$ref"),
        ({"$ref": "https://example.com/schema"}, ".$ref"),
        ({"$ref": "file:///etc/passwd"}, ".$ref"),
    ],
)
def test_what_else_is_wrong_with_a_schema_is_told_with_its_path(part: Any, place: str) -> None:
    tree = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^b+$"}, "c": {"items": part}}}
    assert refusal(schema(tree)) == (Reason.FIELD_INVALID, f"{SCHEMA}.properties.c.items{place}")


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def test_limits_are_told_as_such() -> None:
    assert refusal(JsonSchema(nested(64)))[0] is Reason.GRAMMAR_TOO_COMPLEX
    assert refusal(JsonSchema(nested(100_000)))[0] is Reason.GRAMMAR_TOO_COMPLEX
    assert refusal(schema({"description": "x" * MAX_SCHEMA_BYTES})) == (Reason.GRAMMAR_TOO_COMPLEX, SCHEMA)
    assert refusal(Lark(f'start: "{"x" * 400_000}"')) == (Reason.GRAMMAR_TOO_COMPLEX, "format.grammar")
    assert refusal(Choices(("a",) * (MAX_CHOICES + 1)))[0] is Reason.GRAMMAR_TOO_COMPLEX
    assert asyncio.run(ask(JsonSchema(nested(63))))


def test_a_grammar_has_so_many_rules() -> None:
    def rules(count: int) -> str:
        return "\n".join(
            ["start: A0", *(f'A{place}: A{place + 1} "a"' for place in range(count - 2)), f"A{count - 2}: /b/"]
        )

    assert asyncio.run(ask(Lark(rules(MAX_RULES))))
    assert refusal(Lark(rules(MAX_RULES + 1))) == (Reason.GRAMMAR_TOO_COMPLEX, "format.grammar")
    for text in (rules(MAX_RULES + 1), json.dumps({"grammars": [{"lark_grammar": rules(MAX_RULES + 2)}]})):
        assert refusal(grammar=text) == (Reason.GRAMMAR_TOO_COMPLEX, "sampling.grammar")


def test_what_leads_far_ends_no_process() -> None:
    chain = {str(place): {"allOf": [{"$ref": f"#/$defs/{place + 1}"}]} for place in range(4000)}
    assert asyncio.run(ask(schema({"$ref": "#/$defs/0", "$defs": {**chain, "4000": {"type": "null"}}})))


def test_a_format_that_is_too_large_behind_thoughts_is_told_as_such() -> None:
    output = Lark(f'start: "a" //{"x" * (MAX_GRAMMAR_BYTES - 20)}')
    assert asyncio.run(ask(output))
    assert refusal(output, context=AnswerContext(BY_NAME["hermes"], True)) == (Reason.GRAMMAR_TOO_COMPLEX, "format")


def test_what_a_client_calls_its_properties_is_no_limit() -> None:
    for name in ("limit", "fuel's"):
        tree = {"type": "object", "properties": {}, "required": [name], "additionalProperties": False}
        assert refusal(schema(tree)) == (Reason.FIELD_INVALID, SCHEMA)


def test_what_a_worker_says_of_rows_is_a_limit() -> None:
    assert is_limit(
        "Parser Error: Current row has 6007 items; max is 2000; consider making your grammar left-recursive"
    )


def test_what_is_no_grammar_is_refused_where_it_stands() -> None:
    assert refusal(JsonSchema("{")) == (Reason.FIELD_INVALID, SCHEMA)
    assert refusal(JsonSchema("[]")) == (Reason.FIELD_INVALID, SCHEMA)
    assert refusal(Regex("(")) == (Reason.FIELD_INVALID, "format.regex")
    assert refusal(Lark("start: (")) == (Reason.FIELD_INVALID, "format.grammar")
    assert refusal(Lark("")) == (Reason.FIELD_INVALID, "format.grammar")
    assert refusal(Choices(("a", ""))) == (Reason.FIELD_INVALID, "format.choices.texts")
    assert refusal(grammar="start: \ud800") == (Reason.FIELD_INVALID, "sampling.grammar")
    assert refusal(JsonObject(), grammar='start: "a"') == (Reason.FIELD_INVALID, "sampling.grammar")


def test_a_schema_cannot_have_its_own_keywords_ignored() -> None:
    tree = {"x-guidance": {"lenient": True}, "not": {"type": "string"}}
    assert refusal(schema(tree)) == (Reason.FIELD_INVALID, f"{SCHEMA}.not")


def test_a_burst_of_equal_requests_is_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    whole = checking.check_format

    def check(output: OutputFormat, complain: Any) -> str:
        checked.append(str(output))
        return whole(output, complain)

    monkeypatch.setattr(checking, "check_format", check)

    async def flood() -> list[Any]:
        checks = GrammarChecks()
        try:
            formats = [Regex("a"), Regex("(")] * MAX_CHECKS
            burst = [checks.grammar_of(GenerationRequest("", format=each)) for each in formats]
            told = await asyncio.gather(*burst, return_exceptions=True)
            assert len(checked) == 2
            # What is right is known from then on.
            return [*told, await checks.grammar_of(GenerationRequest("", format=Regex("a")))]
        finally:
            checks.close()

    *told, again = asyncio.run(flood())
    assert len(checked) == 2
    assert set(told[::2]) == {again} == {"start: /a/"}
    assert all(isinstance(each, BlockyardError) and each.reason is Reason.FIELD_INVALID for each in told[1::2])


def test_calls_and_a_grammar_exclude_each_other() -> None:
    async def both() -> None:
        checks = GrammarChecks()
        try:
            rule = ParsingRule("hermes", (ToolSchema("f"),), must_call=True)
            sampling = SamplingParams(grammar='start: "a"')
            await checks.grammar_of(
                GenerationRequest("", parsing=rule, sampling=sampling), AnswerContext(BY_NAME["hermes"])
            )
        finally:
            checks.close()

    with pytest.raises(BlockyardError, match=r"sampling\.grammar: is not allowed beside tool calls"):
        asyncio.run(both())


def test_one_tenant_has_so_many_checks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "MAX_CHECKS", most := 16)

    async def flood() -> list[Any]:
        checks = GrammarChecks()
        try:
            requests = [
                GenerationRequest("", format=Regex(f"a{{{number}}}"), tenant=tenant)
                for number, tenant in enumerate(["loud"] * (most + 1) + ["quiet"])
            ]
            return await asyncio.gather(*map(checks.grammar_of, requests), return_exceptions=True)
        finally:
            checks.close()

    *loud, last, quiet = asyncio.run(flood())
    assert all(isinstance(each, str) for each in (*loud, quiet))
    assert isinstance(last, BlockyardError)
    assert last.reason is Reason.TENANT_QUOTA


def test_one_tenant_holds_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, running = Event(), Semaphore(0)

    def check(text: str, complain: Any) -> str:
        if text.startswith("slow"):
            running.release()
            assert may_end.wait(30)
        return text

    monkeypatch.setattr(checking, "_check_given", check)

    async def flood() -> None:
        checks = GrammarChecks()

        def begin(tenant: str, text: str) -> asyncio.Task[str]:
            request = GenerationRequest("", sampling=SamplingParams(grammar=text), tenant=tenant)
            return asyncio.create_task(checks.grammar_of(request))

        try:
            left, *waiting = [begin("loud", f"slow {number}") for number in range(3)]
            await asyncio.to_thread(running.acquire)
            left.cancel()
            with pytest.raises(asyncio.CancelledError):
                await left
            # The check of the client that left goes on, and none of its tenant's beside it.
            assert await begin("quiet", "quick") == "quick"
            assert not running.acquire(blocking=False)
            may_end.set()
            assert await asyncio.gather(*waiting) == ["slow 1", "slow 2"]
            assert await begin("loud", "quick") == "quick"
        finally:
            may_end.set()
            checks.close()

    asyncio.run(flood())


async def test_a_check_that_waits_ends_with_the_last_request_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "MAX_CHECKS", 3)
    may_end, running, checked = Event(), Semaphore(0), list[str]()

    def check(text: str, complain: Any) -> str:
        checked.append(text)
        running.release()
        assert may_end.wait(30)
        return text

    monkeypatch.setattr(checking, "_check_given", check)
    checks = GrammarChecks()

    def begin(text: str) -> asyncio.Task[str]:
        return asyncio.create_task(checks.grammar_of(GenerationRequest("", sampling=SamplingParams(grammar=text))))

    async def leave(*asked: asyncio.Task[str]) -> None:
        for each in asked:
            each.cancel()
        assert all(isinstance(each, BaseException) for each in await asyncio.gather(*asked, return_exceptions=True))

    try:
        first = begin("first")
        assert await asyncio.to_thread(running.acquire, timeout=30)
        left, kept, one, other = begin("left"), begin("kept"), begin("left"), begin("kept")
        await asyncio.sleep(0)
        with pytest.raises(BlockyardError, match="3 grammars of this tenant"):
            await begin("more")
        await leave(other, one)
        with pytest.raises(BlockyardError, match="3 grammars of this tenant"):
            await begin("more")
        # The last one for it: another may wait in its place, and for the same.
        await leave(left)
        again = begin("left")
        await asyncio.sleep(0)
        with pytest.raises(BlockyardError, match="3 grammars of this tenant"):
            await begin("more")
        await leave(again)
        more = begin("more")
        await asyncio.sleep(0)
        may_end.set()
        assert await asyncio.gather(first, kept, more) == ["first", "kept", "more"]
        assert checked == ["first", "kept", "more"]
    finally:
        may_end.set()
        checks.close()


async def test_checks_that_wait_when_the_gateway_stops_are_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, has_begun = GrammarChecks(), Event()
    multiples = [{"multipleOf": number} for number in (7, 11, 13, 17, 19, 23)]
    endless = schema_text({"type": "integer", "allOf": multiples})

    def check(text: str, complain: Any) -> str:
        has_begun.set()
        return complain(text)

    monkeypatch.setattr(checking, "_check_given", check)
    waiting = [
        asyncio.create_task(checks.grammar_of(GenerationRequest("", sampling=SamplingParams(grammar=endless + end))))
        for end in ("", " ", "  ")
    ]
    assert await asyncio.to_thread(has_begun.wait, 30)
    checks.close()
    for told in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(told, BlockyardError)
        assert told.reason is Reason.DRAINING


@pytest.mark.parametrize(
    "output",
    [schema({"type": "integer"}), schema(True), JsonObject(), Regex("a/b\n"), Choices(('"', "\\")), Lark('start: "}"')],
)
def test_formats_are_parts_of_larger_grammars(output: OutputFormat) -> None:
    grammar = f'start: REASONING "</think>" answer\nREASONING: /[a-z]{{0,9}}/\nanswer: {expression_of(output)}'
    assert asyncio.run(ask(grammar=grammar)) == mark_rules(grammar)
    assert asyncio.run(ask(output))


def test_of_a_schema_that_cannot_be_followed_the_rest_is_where_the_tool_is_not_strict() -> None:
    places = {"type": "array", "items": {"$ref": "#/$defs/place"}, "uniqueItems": True}
    tree: dict[str, Any] = {"properties": {"text": {"type": "string"}, "places": places, "odd": {"not": {}}}}
    tree |= {"required": ["places"], "$defs": {"place": {"type": "integer"}}}

    def rule(*, strict: bool) -> ParsingRule:
        return ParsingRule("qwen3_coder", (ToolSchema("f", json.dumps(tree), strict),), must_call=True)

    async def grammar_of(rule: ParsingRule) -> str:
        checks = GrammarChecks()
        try:
            return await checks.grammar_of(GenerationRequest("", parsing=rule), AnswerContext(BY_NAME["qwen3_coder"]))
        finally:
            checks.close()

    grammar = asyncio.run(grammar_of(rule(strict=False)))
    for name in tree["properties"]:
        assert f"<parameter={name}>" in grammar
    assert '"type": "array"' in grammar
    with pytest.raises(BlockyardError, match=r"tool 'f': .*uniqueItems"):
        asyncio.run(grammar_of(rule(strict=True)))


def test_no_more_of_a_schema_is_tried_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "MAX_REQUEST_SECONDS", 0.02)
    monkeypatch.setattr(tools, "complain_of", lambda *asked: tried.append(asked) or problems.complain_of(*asked))
    tried: list[Any] = []
    tree = json.dumps({"properties": {f"odd{number}": {"not": {}} for number in range(1000)}})
    rule = ParsingRule("hermes", (ToolSchema("f", tree), ToolSchema("g", tree)), must_call=True)

    async def check() -> None:
        checks = GrammarChecks()
        try:
            await checks.grammar_of(GenerationRequest("", parsing=rule), AnswerContext(BY_NAME["hermes"]))
        finally:
            checks.close()

    with pytest.raises(BlockyardError, match=r"conversation\.tools: too complex: it takes more than") as raised:
        asyncio.run(check())
    assert [violation.reason for violation in raised.value.violations] == [Reason.GRAMMAR_TOO_COMPLEX]
    assert len(tried) < 1000


@pytest.mark.parametrize("text", ["start: " + "a " * MAX_GRAMMAR_BYTES, '{"grammars": [' + "{}," * MAX_GRAMMAR_BYTES])
def test_a_grammar_that_is_too_large_is_not_read(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lark_tokens, "_TOKEN", None)
    assert refusal(Lark(text)) == (Reason.GRAMMAR_TOO_COMPLEX, "format.grammar")
    assert refusal(grammar=text) == (Reason.GRAMMAR_TOO_COMPLEX, "sampling.grammar")
