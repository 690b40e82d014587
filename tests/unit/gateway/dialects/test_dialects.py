"""Each dialect: what comes out of its answers, however they are cut, and wherever they end."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dialects.table import BY_NAME, DIALECTS
from tests.unit.gateway.dialects.forms import ANSWERS, FORMS, Answer, dumps
from tests.unit.gateway.dialects.reading import TOOLS, Reading, misplaced, payload, pieces_of, read, told


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_told_apart(name: str) -> None:
    answer = ANSWERS[name]
    found = read(answer.dialect, [answer.raw])
    assert (found.text, found.reasoning) == (answer.text, answer.reasoning)
    assert [(name, json.loads(arguments)) for name, _, arguments in found.calls] == list(answer.calls)
    assert (found.num_calls, found.num_invalid) == (len(answer.calls), 0)
    if answer.copies:
        assert [arguments for _, _, arguments in found.calls] == [dumps(arguments) for _, arguments in answer.calls]


@pytest.mark.parametrize("name", ANSWERS)
def test_what_comes_out_depends_on_what_came_alone(name: str) -> None:
    answer = ANSWERS[name]
    whole = read(answer.dialect, [answer.raw])
    slow = Reading(answer.dialect)
    for cut in range(1, len(answer.raw)):
        beginning, rest = answer.raw[:cut], answer.raw[cut:]
        reading = Reading(answer.dialect)
        assert reading.push(beginning) == slow.push(beginning[-1])
        assert reading.push(rest, is_last=True) == whole
        assert payload(told(read(answer.dialect, [beginning]))) == payload(beginning), "lost, or told twice"
    assert slow.push(answer.raw[-1], is_last=True) == whole


@pytest.mark.parametrize("name", FORMS)
def test_a_call_of_an_unknown_tool_is_text(name: str) -> None:
    form = FORMS[name]
    raw = f"{form.calls([('nope', {'text': '東京'})])}"
    found = read(form.dialect, list(raw))
    assert (found.calls, found.num_calls) == ((), 0)
    assert "nope" in found.text
    assert payload(found.text) == payload(raw)
    assert found.num_invalid == (name not in ("llama3_json", "pythonic"))


@pytest.mark.parametrize("tool", ["fs/read", "a:b", "x$y.z-1", "read_json", "json", "\u6771\u4eac"])
@pytest.mark.parametrize("name", FORMS)
def test_a_tool_may_have_any_name_of_a_word(name: str, tool: str) -> None:
    form = FORMS[name]
    raw = form.calls([(tool, {"text": "a"})])
    tools = {tool: TOOLS["f"], tool[:2]: TOOLS["f"]}
    found = read(form.dialect, list(raw), tools=tools)
    assert [(called, json.loads(arguments)) for called, _, arguments in found.calls] == [(tool, {"text": "a"})]
    assert read(form.dialect, [raw], tools=tools) == found


@pytest.mark.parametrize("name", FORMS)
def test_without_tools_calls_are_text(name: str) -> None:
    form = FORMS[name]
    raw = form.calls([("f", {"text": "東京"})])
    found = read(form.dialect, [raw], tools={})
    assert found.calls == ()
    assert payload(found.text) == payload(raw)


@pytest.mark.parametrize("name", [name for name in ANSWERS if name.endswith((": nested", ": escapes", ": two"))])
def test_broken_calls_come_out_alike_from_whatever_has_come(name: str) -> None:
    answer, junk = ANSWERS[name], itertools.cycle(']!,)}<\\" ')
    for cut, character in zip(range(len(answer.raw)), junk, strict=False):
        broken = f"{answer.raw[:cut]}{character}{answer.raw[cut:]} so."
        assert read(answer.dialect, pieces_of(broken, [cut, cut + 1])) == read(answer.dialect, [broken])
        assert misplaced(answer.dialect, broken) is None
        assert misplaced(answer.dialect, answer.raw[:cut]) is None


@settings(max_examples=300)
@given(st.sampled_from(sorted(ANSWERS)), st.data())
def test_random_pieces_of_answers_one_behind_another_come_out_alike(name: str, data: st.DataObject) -> None:
    answer = ANSWERS[name]
    others = sorted(other for other in ANSWERS if ANSWERS[other].dialect == answer.dialect)
    raw = answer.raw + "".join(ANSWERS[other].raw for other in data.draw(st.lists(st.sampled_from(others), max_size=2)))
    raw = raw[: data.draw(st.integers(1, len(raw)))]
    cuts = data.draw(st.lists(st.integers(0, len(raw)), max_size=8))
    whole = read(answer.dialect, [raw])
    assert read(answer.dialect, pieces_of(raw, cuts)) == whole
    assert payload(told(whole)) == payload(raw)


def test_the_list_of_dialects_is_in_order() -> None:
    assert len(BY_NAME) == len(DIALECTS)
    assert {dialect.name for dialect in DIALECTS if dialect.calls} == {form.dialect for form in FORMS.values()}


def test_an_answer_is_what_it_says() -> None:
    assert ANSWERS["hermes: a text"] == Answer(
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"text" : "東京 é"}}\n</tool_call>',
        calls=(("f", {"text": "東京 é"}),),
    )
