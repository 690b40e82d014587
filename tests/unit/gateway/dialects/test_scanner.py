"""What comes out of an answer is the same however it is cut, and nothing of it is lost."""

from __future__ import annotations

import pytest

from gateway.dialects.scanner import Scanner
from gateway.dialects.table import BY_NAME
from tests.unit.gateway.dialects.reading import TOOLS, misplaced, pieces_of, read

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "</tool_call> \\" }", "n": [1, {"y": 1.50}]}}\n</tool_call>'
# The answer, and what comes out: text, reasoning, calls.
ANSWERS = {
    "text alone": ("Hello <b>, \n", "Hello <b>, \n", "", ()),
    "a call": (CALL, "", "", (("f", '{"x": "</tool_call> \\" }", "n": [1, {"y": 1.50}]}'),)),
    "text before and behind": (f"Let me see.\n{CALL}\nWell.", "Let me see.Well.", "", (("f", None),)),
    "two": (
        f'{CALL}\n<tool_call>\n{{"name": "g", "arguments": {{}}}}\n</tool_call>',
        "",
        "",
        (("f", None), ("g", "{}")),
    ),
    "arguments first": ('<tool_call>{"arguments": {"x": 1 }, "name": "g"}</tool_call>', "", "", (("g", '{"x": 1 }'),)),
    "no arguments": ('<tool_call>{"name": "g"}</tool_call>', "", "", (("g", "{}"),)),
    "arguments as text": (
        '<tool_call>{"name": "g", "arguments": "{\\"x\\": \\"\\ud83d\\ude00\\u00e9\\n\\"}"}</tool_call>',
        "",
        "",
        (("g", '{"x": "😀é\n"}'),),
    ),
    "arguments as text, cut": (
        '<tool_call>{"name": "g", "arguments": "{\\"x\\": \\"\\ud83d',
        "",
        "",
        (("g", '{"x": "\ufffd'),),
    ),
    "reasoning": ("<think>\nHm, <tool_call>?\n</think>\n\nYes.", "Yes.", "Hm, <tool_call>?", ()),
    "no reasoning": ("<think>\n\n</think>\n\nYes.", "Yes.", "", ()),
    "a marker within text": ("A <think> tag.", "A <think> tag.", "", ()),
    "an unknown tool": ('<tool_call>{"name": "h", "arguments": {}}</tool_call> .', None, "", ()),
    "no object": ("<tool_call>f(1)</tool_call>", None, "", ()),
    "another key": ('<tool_call>{"tool": "f"}</tool_call>', None, "", ()),
    "arguments that are none": ('<tool_call>{"name": "g", "arguments": null}</tool_call>', None, "", ()),
    "text between": (f'A.{CALL}B.<tool_call>{{"name": "g"}}</tool_call>C.', "A.B.C.", "", (("f", None), ("g", "{}"))),
    "a brace missing": ('<tool_call>{"name": "g", "arguments": {"x": 1}</tool_call>', "", "", (("g", '{"x": 1}'),)),
    "cut within arguments": ('<tool_call>{"name": "g", "arguments": {"x": "a', "", "", (("g", '{"x": "a'),)),
    "broken arguments": ('<tool_call>{"name": "g", "arguments": {"x": </tool_call>!', "!", "", (("g", '{"x": '),)),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_is_told_apart_alike_however_it_is_cut(case: str) -> None:
    answer, text, reasoning, calls = ANSWERS[case]
    whole = read("hermes", [answer])
    assert (whole.text, whole.reasoning) == (answer if text is None else text, reasoning)
    told = [(name, arguments) for name, _, arguments in whole.calls]
    assert [name for name, _ in told] == [name for name, _ in calls]
    assert all(due in (None, found) for (_, found), (_, due) in zip(told, calls, strict=True))
    assert read("hermes", list(answer)) == whole
    for cut in range(len(answer)):
        assert read("hermes", pieces_of(answer, [cut])) == whole


def test_what_comes_at_once_comes_in_its_order() -> None:
    answer, *_ = ANSWERS["text between"]
    assert read("hermes", [answer]).order == ("text", "call 0", "text", "call 1", "text")
    thought = "<|channel|>analysis<|message|>Hm.<|end|>"
    answer = f"{thought}<|channel|>final<|message|>A.<|end|>{thought}<|channel|>final<|message|>B."
    assert read("harmony", [answer]).order == ("reasoning", "text", "reasoning", "text")


@pytest.mark.parametrize(
    ("dialect", "answer"),
    [
        ("gemma", f"<|tool_call>call:f{{x:{'a' * 5000}}}<tool_call|>"),
        ("pythonic", f"[f(x={'-' * 4000}1)]"),
    ],
)
def test_a_value_without_an_end_is_text_however_it_is_cut(dialect: str, answer: str) -> None:
    whole = read(dialect, [answer])
    assert whole.num_calls == 0
    assert [whole.text.count(character) for character in "a-"] == [answer.count("a" * 5000) * 5000, answer.count("-")]
    assert read(dialect, pieces_of(answer, range(500, 5000, 500))) == whole


@pytest.mark.parametrize("value", ["NaN", "-Infinity"])
def test_a_number_that_json_has_not_is_a_text(value: str) -> None:
    found = read("qwen3_coder", [f"<function=g><parameter=x>{value}</parameter></function>"])
    assert found.calls == (("g", "", f'{{"x": "{value}"}}'),)


@pytest.mark.parametrize(
    ("key", "is_text", "value", "written"),
    [
        ("num", "true", "5", '"5"'),
        ("other", "true", "[1]", '"[1]"'),
        ("text", "false", "5", "5"),
        ("text", "false", '"5"', '"5"'),
        ("other", "false", "True", "true"),
        ("other", "false", "five", '"five"'),
    ],
)
def test_a_value_is_what_the_model_says_whatever_the_schema_says(
    key: str, is_text: str, value: str, written: str
) -> None:
    argument = f'<｜DSML｜parameter name="{key}" string="{is_text}">{value}</｜DSML｜parameter>'
    answer = f'<｜DSML｜invoke name="f">\n{argument}\n</｜DSML｜invoke>'
    whole = read("deepseek_v32", [answer])
    assert whole.calls == (("f", "", f'{{"{key}": {written}}}'),)
    assert read("deepseek_v32", list(answer)) == whole


@pytest.mark.parametrize(
    ("value", "written"), [("1e999", "1e999"), ("-0", "-0"), (".5", "0.5"), ("1_000", "1000"), ("+1e999", None)]
)
def test_a_number_of_python_comes_as_json(value: str, written: str | None) -> None:
    found = read("pythonic", [f"[g(x={value})]"])
    assert (found.num_calls, found.num_invalid) == ((1, 0) if written else (0, 1))
    assert found.calls[0][2] == (f'{{"x": {written}}}' if written else '{"x": ')


@pytest.mark.parametrize("rest", [', {"name": "h"}]', ', {"x": 1}]', " and so on"])
def test_behind_the_one_call_that_is_wanted_nothing_comes(rest: str) -> None:
    answer = f'<tool_call>[{{"name": "g"}}{rest}</tool_call>'
    whole = read("hermes", [answer], one_call=True)
    assert (whole.text, whole.calls) == ("", (("g", "", "{}"),))
    assert read("hermes", list(answer), one_call=True) == whole


@pytest.mark.parametrize(
    ("dialect", "answer"),
    [
        ("hermes", ANSWERS["text between"][0]),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>So.<tool_call>f<arg_key>text"),
        ("glm", f"<tool_call>f<arg_key>a{CALL} so."),
    ],
)
def test_what_stands_before_text_is_told_of_what_stands_before_it_alone(dialect: str, answer: str) -> None:
    assert len(Scanner(BY_NAME[dialect], TOOLS).push(answer, is_last=True)) > 1
    assert misplaced(dialect, answer) is None
