"""What grammars of calls allow: the form of each dialect, for every tool, behind thoughts, and nothing else."""

from __future__ import annotations

import functools
import json
import random
import re
import time
import tracemalloc
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from blockyard.errors import BlockyardError, Reason
from blockyard.grammars.limits import MAX_GRAMMAR_BYTES
from gateway.dialects.answer_parser import ToolSchema
from gateway.dialects.dialect import AnswerContext, Style
from gateway.dialects.table import BY_NAME, DIALECTS
from gateway.grammars.calls import write_answer, write_calls
from gateway.grammars.expressions import json_expression
from gateway.grammars.tools import followed
from tests.unit.gateway.dialects.forms import FORMS
from tests.unit.gateway.dialects.reading import read
from tests.unit.gateway.harness import DEMO_MODEL

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "num": {"type": "number"}},
    "required": ["text", "num"],
    "additionalProperties": False,
}
TOOLS = (ToolSchema("f", json.dumps(SCHEMA), strict=True), ToolSchema("g"))
FORCED = [dialect.name for dialect in DIALECTS if dialect.calls]
# With markers that are special tokens, which no text spells, and with texts as markers; harmony has none of these.
BOTH = [(name, special) for name in FORCED for special in (True, False) if special or name != "harmony"]


class Vocabulary:
    """The demo model's, with a dialect's markers as special tokens or without."""

    def __init__(self, dialect: str, *, special: bool) -> None:
        self._backend = tokenizers.Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
        markers = " ".join(BY_NAME[dialect].markers) if special else "<|end|>"
        texts = sorted(set(re.findall(r"｜DSML｜|<(?!/?｜DSML)[^<>\s=\"]+>|<\|\"\|>|\[[A-Z_/]+\]", markers)))
        self._backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in texts])
        self.special_ids = {text: self._backend.token_to_id(text) for text in texts}
        self._library = LLTokenizer(self._backend.to_str(), n_vocab=self._backend.get_vocab_size(), eos_token=0)
        by_text = self._backend.get_vocab()
        self._is_ending = np.zeros(self._backend.get_vocab_size(), np.bool_)
        self._is_ending[[0, *(token_id for text, token_id in by_text.items() if text[0] in '",]})<')]] = True

    def allows(self, grammar: str, text: str) -> bool:
        """Whether a text is allowed as a whole answer."""
        matcher = LLMatcher(self._library, grammar)
        assert not matcher.get_error(), f"{matcher.get_error()}\n{grammar}"
        token_ids = self._backend.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    def write(self, grammar: str, chance: random.Random, *, max_tokens: int = 300) -> str | None:
        """Returns an answer of random tokens, which likes to end what it has begun; None for one that is too long."""
        matcher = LLMatcher(self._library, grammar)
        assert not matcher.get_error(), f"{matcher.get_error()}\n{grammar}"
        written: list[int] = []
        while not matcher.is_stopped() and len(written) < max_tokens:
            allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), np.uint8))
            ending = allowed[self._is_ending[allowed]]
            token_id = int(chance.choice(ending if len(ending) and chance.random() < 0.3 else allowed))
            assert matcher.consume_token(token_id)
            written.append(token_id)
        text = self._backend.decode([each for each in written if each], skip_special_tokens=False)
        return text if matcher.is_accepting() or matcher.is_stopped() else None


@functools.cache
def vocabulary(dialect: str, special: bool) -> Vocabulary:
    return Vocabulary(dialect, special=special)


def call(name: str, dialect: str, *, num: str = "1.5") -> str:
    """A call in the form that grammars allow, by the dialect's own words."""
    calls = BY_NAME[dialect].calls
    assert calls is not None
    form = calls.template
    arguments = f'{{"text": "a <b>", "num": {num}}}' if name == "f" else "{}"
    if calls.style is Style.TAGS:
        line = "\n" if calls.trims_lines else ""
        between = f"\n{calls.value.begins[0]}" if calls.value.begins else line
        values = {"text": "a <b>", "num": num} if name == "f" else {}
        key_ends = {"text": calls.typed.text or calls.key.ends[0], "num": calls.typed.json or calls.key.ends[0]}
        end = f"{line}{calls.value.ends[0]}{form.parameter}"
        arguments = "".join(
            f"{calls.key.begins[0]}{key}{key_ends[key]}{between}{value}{end}" for key, value in values.items()
        )
    if calls.style is Style.PYTHONIC:
        arguments = f'text="a <b>", num={num}' if name == "f" else ""
    if calls.style is Style.GEMMA:
        arguments = f"num:{num},text:{calls.quote}a <b>{calls.quote}" if name == "f" else ""
    return f"{form.before}{name}{form.middle}{arguments}{form.after}"


def whole(dialect: str, *calls: str) -> str:
    form = BY_NAME[dialect].calls.template  # type: ignore[union-attr]
    return form.opens + (form.separator or "").join(calls) + form.shuts


def thought(dialect: str) -> str:
    known = BY_NAME[dialect]
    if known.reasoning is None:
        return ""
    return f"{known.reasoning.begins[0]}hm {{x}}{known.reasoning.ends[0]}{known.behind_reasoning}"


@pytest.mark.parametrize(("dialect", "special"), BOTH)
def test_a_model_that_must_call_calls(dialect: str, special: bool) -> None:
    words = vocabulary(dialect, special)
    context = AnswerContext(BY_NAME[dialect], special_ids=words.special_ids)
    grammar = write_calls(context, TOOLS, must_call=True, one_call=False)
    one, two = whole(dialect, call("f", dialect)), whole(dialect, call("f", dialect), call("g", dialect))
    several = BY_NAME[dialect].calls.template.separator is not None  # type: ignore[union-attr]
    assert words.allows(grammar, one)
    assert words.allows(grammar, thought(dialect) + one)
    assert words.allows(grammar, two) == several
    for wrong in (whole(dialect, call("x", dialect)), whole(dialect, call("f", dialect, num='"1"')), "Hello.", ""):
        assert not words.allows(grammar, wrong), wrong
    alone = write_calls(context, TOOLS, must_call=True, one_call=True)
    assert words.allows(alone, one)
    assert not words.allows(alone, two)
    # What it writes then is read.
    found = read(dialect, [thought(dialect) + (two if several else one)])
    assert (found.text, found.num_calls, found.num_invalid) == ("", 1 + several, 0)


@pytest.mark.parametrize(("dialect", "special"), BOTH)
def test_a_model_that_may_call_says_anything_or_calls_in_form(dialect: str, special: bool) -> None:
    words = vocabulary(dialect, special)
    context = AnswerContext(BY_NAME[dialect], special_ids=words.special_ids)
    grammar = write_calls(context, TOOLS, must_call=False, one_call=False)
    said, called = f"{BY_NAME[dialect].before_text}Hi <b>. ", whole(dialect, call("f", dialect))
    assert words.allows(grammar, said)
    assert words.allows(grammar, called)
    assert words.allows(grammar, thought(dialect) + said)
    assert not words.allows(grammar, whole(dialect, call("x", dialect)))
    if not BY_NAME[dialect].calls.bare and not BY_NAME[dialect].before_text:  # type: ignore[union-attr]
        assert words.allows(grammar, said + called)
        assert not words.allows(grammar, said + whole(dialect, call("x", dialect)))


@pytest.mark.parametrize("dialect", ["hermes", "llama3_json", "qwen3_coder", "lfm2"])
@pytest.mark.parametrize("told", [["object", "null"], "array", "string", ["null", "integer"]])
def test_arguments_are_an_object_whatever_a_schema_says(dialect: str, told: Any) -> None:
    words = vocabulary(dialect, True)
    context = AnswerContext(BY_NAME[dialect], special_ids=words.special_ids)
    tool = ToolSchema("f", json.dumps({**SCHEMA, "type": told}))
    grammar = write_calls(context, (followed(tool, lambda text: ""),), must_call=True, one_call=True)
    one = whole(dialect, call("f", dialect))
    assert words.allows(grammar, one)
    if dialect in ("hermes", "llama3_json"):
        (number,) = [number for number in range(len(one)) if one.startswith('{"text"', number)]
        arguments = one[number : one.index("}", number) + 1]
        for other in ("null", "[]", '"a"', "5"):
            assert not words.allows(grammar, one.replace(arguments, other)), other
    if "object" not in told:
        with pytest.raises(BlockyardError, match=r"tools\.type: tool 'f': must be object"):
            followed(tool._replace(strict=True), lambda text: "")


@pytest.mark.parametrize(("dialect", "special"), [("hermes", True), ("hermes", False), ("harmony", True)])
def test_a_format_begins_behind_what_is_thought(dialect: str, special: bool) -> None:
    words = vocabulary(dialect, special)
    expression = json_expression(json.dumps(SCHEMA))
    before, answer = BY_NAME[dialect].before_text, '{"text": "a", "num": 1}'
    for is_open in (False, True):
        grammar = write_answer(AnswerContext(BY_NAME[dialect], is_open, words.special_ids), expression)
        thinks = thought(dialect)
        if is_open and thinks:
            begin = BY_NAME[dialect].reasoning.begins[0]  # type: ignore[union-attr]
            thinks = thinks.removeprefix(begin)
        assert words.allows(grammar, f"{thinks}{before}{answer}")
        assert not words.allows(grammar, f"{thinks}{before}Hello.")
        assert words.allows(grammar, f"{before}{answer}") == (not is_open or not thinks)
    calls = write_calls(
        AnswerContext(BY_NAME[dialect], special_ids=words.special_ids),
        TOOLS,
        must_call=False,
        one_call=True,
        answer=expression,
    )
    assert words.allows(calls, f"{before}{answer}")
    assert words.allows(calls, whole(dialect, call("g", dialect)))
    assert not words.allows(calls, f"{before}Hello.")


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("dialect", ["qwen3_coder", "glm", "minimax", "deepseek_v32"])
def test_a_text_between_tags_is_as_long_as_it_may_be(dialect: str, special: bool) -> None:
    words = vocabulary(dialect, special)
    text = {"type": "string", "minLength": 2, "maxLength": 6}
    schema = {**SCHEMA, "properties": {"text": text, "num": {"type": "number"}}}
    tools = (ToolSchema("f", json.dumps(schema), strict=True),)
    grammar = write_calls(
        AnswerContext(BY_NAME[dialect], special_ids=words.special_ids), tools, must_call=True, one_call=True
    )
    one = whole(dialect, call("f", dialect))
    for value, allowed in (("ab", True), ("a <b>", True), ("abcdef", True), ("a", False), ("abcdefgh", False)):
        assert words.allows(grammar, one.replace("a <b>", value)) == allowed, value


def test_a_token_within_a_marker_stands_behind_what_the_marker_begins_with() -> None:
    words = vocabulary("deepseek_v32", True)
    context = AnswerContext(BY_NAME["deepseek_v32"], special_ids=words.special_ids)
    one = whole("deepseek_v32", call("f", "deepseek_v32"))
    for must_call in (True, False):
        grammar = write_calls(context, TOOLS, must_call=must_call, one_call=True)
        assert words.allows(grammar, one)
        for place in range(1, one.count("<") + 1):
            before = "<".join(one.split("<")[:place])
            if one[len(before) :].startswith(("<｜", "</｜")):
                rest = one[len(before) :].lstrip("</")
                assert not words.allows(grammar, before + rest), before


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("dialect", ["qwen3_coder", "glm", "minimax", "deepseek_v32"])
@pytest.mark.parametrize(
    ("part", "values", "others"),
    [
        ({"type": ["string", "null"]}, ["a <b>", None], []),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, ["", "a\nb", None], []),
        ({"anyOf": [{"$ref": "#/$defs/text"}, {"type": "integer"}]}, ["a", 5, "5.5"], []),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, ["a", [1, "b"]], []),
        ({"enum": ["a", "b", None, 2]}, ["a", None, 2], ["c", 3, True]),
        ({"enum": ["a", 2], "type": ["string", "null"]}, ["a"], ["c", 2]),
        ({"anyOf": [{"const": "a"}, {"enum": ["b"], "type": "string"}, {"type": "boolean"}]}, ["a", "b", True], ["c"]),
    ],
)
def test_a_value_that_may_be_a_text_is_written_as_templates_write_it(
    dialect: str, special: bool, part: dict[str, Any], values: list[Any], others: list[Any]
) -> None:
    words = vocabulary(dialect, special)
    schema = {"type": "object", "properties": {"x": part}, "required": ["x"], "$defs": {"text": {"type": "string"}}}
    tools = (ToolSchema("f", json.dumps(schema), strict=True),)
    grammar = write_calls(
        AnswerContext(BY_NAME[dialect], special_ids=words.special_ids), tools, must_call=True, one_call=True
    )
    for value in (*values, *others):
        answer = FORMS[dialect].calls([("f", {"x": value})])
        if dialect == "minimax":
            answer = answer.replace("</invoke>\n\n", "</invoke>\n")
        assert words.allows(grammar, answer) == (value in values), answer
        if value in values:
            found = read(dialect, [answer], tools={"f": json.dumps(schema)})
            assert [json.loads(arguments) for _, _, arguments in found.calls] == [{"x": value}]


@pytest.mark.parametrize("dialect", ["qwen3_coder", "glm", "minimax", "deepseek_v32"])
def test_whatever_stands_between_tags_fits_the_schema(dialect: str) -> None:
    text = {"type": "string", "minLength": 1, "maxLength": 6}
    properties: dict[str, Any] = {
        "a": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "b": {"type": ["null", "string", "boolean"]},
        "c": {"enum": ["x", 1.5, None, [1]]},
        "d": {"oneOf": [{"const": "x"}, {"type": "boolean"}]},
        "e": {"allOf": [text]},
        "f": text,
    }
    for special in (True, False):
        words, chance = vocabulary(dialect, special), random.Random(dialect)
        num_whole = 0
        for key, part in properties.items():
            schema = {"type": "object", "properties": {key: part}, "required": [key]}
            # What an allOf asks is passed over.
            tools = (ToolSchema("f", json.dumps(schema), strict=key != "e"),)
            context = AnswerContext(BY_NAME[dialect], special_ids=words.special_ids, may_think=False)
            answer = words.write(write_calls(context, tools, must_call=True, one_call=True), chance, max_tokens=2000)
            if answer is None:
                continue
            num_whole += 1
            found = read(dialect, [answer], tools={"f": json.dumps(schema)})
            assert (found.num_calls, found.num_invalid, found.text) == (1, 0, ""), answer
            if key != "e":
                jsonschema.validate(json.loads(found.calls[0][2]), schema)
        assert num_whole >= 3


@pytest.mark.parametrize(
    ("part", "keyword"),
    [
        ({"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}, "format"),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}]}, "minimum"),
        ({"type": ["string", "null"], "maxLength": 3}, "maxLength"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "pattern": "a"}, "pattern"),
    ],
)
def test_what_a_text_among_others_cannot_follow_is_refused_of_strict_tools(part: dict[str, Any], keyword: str) -> None:
    schema = json.dumps({"properties": {"x": part}})
    speech = AnswerContext(BY_NAME["qwen3_coder"])
    assert keyword not in write_calls(speech, (ToolSchema("f", schema),), must_call=True, one_call=True)
    with pytest.raises(BlockyardError, match=f"the keyword {keyword} of tool 'f' cannot be enforced, since 'x' stands"):
        write_calls(speech, (ToolSchema("f", schema, strict=True),), must_call=True, one_call=True)


def test_what_cannot_be_followed_between_tags_is_refused_of_strict_tools() -> None:
    schema = json.dumps({"properties": {"x": {"type": "string", "pattern": "a+"}, "y": {"const": "b"}}})
    for strict in (False, True):
        tools = (ToolSchema("f", schema, strict),)
        if strict:
            with pytest.raises(BlockyardError, match="the keyword pattern of tool 'f' cannot be enforced"):
                write_calls(AnswerContext(BY_NAME["glm"]), tools, must_call=True, one_call=True)
        else:
            assert '"b"' in write_calls(AnswerContext(BY_NAME["glm"]), tools, must_call=True, one_call=True)


def test_a_reference_between_tags_is_followed_once() -> None:
    begin = time.process_time()
    refer = {name: [{"$ref": f"#/$defs/{inner}"}] * 200 for name, inner in zip("abc", "bcd", strict=True)}
    definitions = {**{name: {"anyOf": several} for name, several in refer.items()}, "d": {"type": "string"}}
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": definitions}
    context = AnswerContext(BY_NAME["qwen3_coder"])
    written = write_calls(context, [ToolSchema("f", json.dumps(schema), strict=True)], must_call=True, one_call=True)
    assert "text_0_0" in written
    assert time.process_time() - begin < 1


@pytest.mark.parametrize("dialect", FORCED)
def test_no_more_of_a_grammar_is_written_than_is_taken(dialect: str) -> None:
    properties = {f"x{number}": {"type": "null"} for number in range(200)}
    definitions = {"d": {"type": "null", "description": "d" * 50_000}}
    schema = json.dumps({"type": "object", "properties": properties, "$defs": definitions})
    tools = [ToolSchema(f"f{number}", schema) for number in range(100)]
    tracemalloc.start()
    try:
        with pytest.raises(BlockyardError, match=r"conversation\.tools: too large") as raised:
            write_calls(AnswerContext(BY_NAME[dialect]), tools, must_call=True, one_call=True)
        assert tracemalloc.get_traced_memory()[1] < 16 * MAX_GRAMMAR_BYTES
    finally:
        tracemalloc.stop()
    assert [violation.reason for violation in raised.value.violations] == [Reason.GRAMMAR_TOO_COMPLEX]


def test_choices_that_are_no_texts_are_none_between_tags() -> None:
    properties = {"x": {"type": "string", "enum": ["a", None, 1]}, "y": {"type": "string", "const": 5}}
    tools = (ToolSchema("f", json.dumps({"properties": properties})),)
    words = vocabulary("qwen3_coder", True)
    context = AnswerContext(BY_NAME["qwen3_coder"], special_ids=words.special_ids)
    grammar = write_calls(context, tools, must_call=True, one_call=True)
    for value, allowed in (("a", True), ("null", False), ("1", False)):
        argument = f"<parameter=x>\n{value}\n</parameter>\n"
        answer = f"<tool_call>\n<function=f>\n{argument}</function>\n</tool_call>"
        assert words.allows(grammar, answer) == allowed, value


@pytest.mark.parametrize("parameters", ["", '{"type": "object", "additionalProperties": {"type": "string"}}'])
def test_arguments_that_no_schema_names_may_be_any(parameters: str) -> None:
    for dialect in ("qwen3_coder", "glm", "minimax", "deepseek_v32"):
        for special in (True, False):
            words = vocabulary(dialect, special)
            context = AnswerContext(BY_NAME[dialect], special_ids=words.special_ids)
            tools = (ToolSchema("f", parameters), ToolSchema("g", '{"properties": {}}'))
            grammar = write_calls(context, tools, must_call=True, one_call=True)
            named = call("f", dialect)
            assert words.allows(grammar, whole(dialect, named))
            assert words.allows(grammar, whole(dialect, call("g", dialect)))
            assert not words.allows(grammar, whole(dialect, named.replace("f", "g", 1)))
