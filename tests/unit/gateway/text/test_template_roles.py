"""Which orders of roles templates take, and what becomes of conversations in other orders."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard.errors import BlockyardError
from gateway.text.chat_template import ChatTemplate
from gateway.text.template_roles import TemplateRoles, arrange
from tests.unit.gateway.text.guarded_templates import ALTERNATING, ONE_SYSTEM, TEMPLATES

Json = dict[str, Any]
TOKENS = {"bos_token": "<s>"}
# Each refuses, or moves, a system's message behind others.
STRICT = [name for name, (_, roles) in TEMPLATES.items() if not roles.takes_later_system]
WITH_TOOLS = {"Qwen3.5", "Mistral Small", "moving", "hoisting", "losing"}
NO_SYSTEM = TemplateRoles(takes_system=False, takes_later_system=False, takes_turns_in_a_row=False)
QWEN = TEMPLATES["Qwen3.5"][1]
MISTRAL = TEMPLATES["Mistral Small"][1]

CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "read", "arguments": {}}}
KINDS: dict[str, Json] = {
    "S": {"role": "system"},
    "U": {"role": "user"},
    "A": {"role": "assistant"},
    "C": {"role": "assistant", "tool_calls": [CALL]},
    "T": {"role": "tool", "tool_call_id": "a1b2c3d4e"},
}


def messages_of(kinds: str, *, thinks: bool = True) -> list[Json]:
    """Makes messages of letters; each has its place as its text, and an answer that calls a tool thinks first."""
    return [
        KINDS[kind]
        | {"content": f"[{number}]"}
        | ({"reasoning_content": f"({number})"} if thinks and kind == "C" else {})
        for number, kind in enumerate(kinds)
    ]


@functools.cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name][0], TOKENS)


def arranged(kinds: str, roles: TemplateRoles) -> list[tuple[str, str]]:
    told = arrange(messages_of(kinds), roles)
    return [(each["role"], each["content"].replace("system-reminder", "r").replace("\n", "|")) for each in told]


def render(name: str, kinds: str, *, thinks: bool = True) -> str:
    template = template_of(name)
    messages = arrange(messages_of(kinds, thinks=thinks), template.roles)
    return template.render(messages=messages, tools=None, add_generation_prompt=False)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_takes_is_found(name: str) -> None:
    assert template_of(name).roles == TEMPLATES[name][1]


def test_what_becomes_of_messages_is_described() -> None:
    assert TemplateRoles().describe() == ""
    assert ONE_SYSTEM.describe() == "later system messages become <system-reminder> in user turns"
    parts = [len(roles.describe().split("; ")) for roles in (ALTERNATING, NO_SYSTEM, QWEN, MISTRAL)]
    assert parts == [2, 3, 2, 3]


def test_what_becomes_of_messages_is_logged_when_a_template_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for name in ("plain", "losing"):
        ChatTemplate(TEMPLATES[name][0], TOKENS)
    (record,) = caplog.records
    assert record.fields == {"changes": ONE_SYSTEM.describe()}  # type: ignore[attr-defined]


def test_what_a_template_takes_stays_as_it_is() -> None:
    messages = [*messages_of("SSUSUAASCTSTU"), {"role": "system", "content": ""}]
    assert arrange(messages, TemplateRoles()) == messages
    fine = messages_of("SUAUCTAU")
    for roles in (ONE_SYSTEM, ALTERNATING, QWEN, MISTRAL):
        assert arrange(fine, roles) == fine


@pytest.mark.parametrize(
    ("roles", "kinds", "expected"),
    [
        (ONE_SYSTEM, "SSU", [("system", "[0]||[1]"), ("user", "[2]")]),
        (ONE_SYSTEM, "S", [("system", "[0]")]),
        (ONE_SYSTEM, "US", [("user", "[0]"), ("user", "<r>|[1]|</r>")]),
        (
            ONE_SYSTEM,
            "SUASU",
            [("system", "[0]"), ("user", "[1]"), ("assistant", "[2]"), ("user", "<r>|[3]|</r>"), ("user", "[4]")],
        ),
        (ONE_SYSTEM, "CTS", [("assistant", "[0]"), ("tool", "[1]"), ("user", "<r>|[2]|</r>")]),
        (QWEN, "CTS", [("assistant", "[0]"), ("tool", "[1]||<r>|[2]|</r>")]),
        (QWEN, "CTST", [("assistant", "[0]"), ("tool", "[1]||<r>|[2]|</r>"), ("tool", "[3]")]),
        (QWEN, "CTU", [("assistant", "[0]"), ("tool", "[1]"), ("user", "[2]")]),
        (ALTERNATING, "USA", [("user", "[0]||<r>|[1]|</r>"), ("assistant", "[2]")]),
        (ALTERNATING, "UASU", [("user", "[0]"), ("assistant", "[1]"), ("user", "<r>|[2]|</r>||[3]")]),
        (ALTERNATING, "UUAA", [("user", "[0]||[1]"), ("assistant", "[2]||[3]")]),
        (MISTRAL, "UCTSU", [("user", "[0]"), ("assistant", "[1]"), ("tool", "[2]||<r>|[3]|</r>||[4]")]),
        (NO_SYSTEM, "SSU", [("user", "[0]||[1]||[2]")]),
        (NO_SYSTEM, "S", [("user", "[0]")]),
        (NO_SYSTEM, "SA", [("user", "[0]"), ("assistant", "[1]")]),
        (NO_SYSTEM, "SUS", [("user", "[0]||[1]||<r>|[2]|</r>")]),
    ],
)
def test_messages_are_put_into_an_order_that_is_taken(
    roles: TemplateRoles, kinds: str, expected: list[tuple[str, str]]
) -> None:
    assert arranged(kinds, roles) == expected


def test_one_of_two_answers_in_a_row_keeps_the_calls_and_the_reasoning() -> None:
    (told,) = arrange(messages_of("AC"), ALTERNATING)
    assert told == {"role": "assistant", "content": "[0]\n\n[1]", "reasoning_content": "(1)", "tool_calls": [CALL]}
    assert [each["content"] for each in arrange(messages_of("CA"), ALTERNATING)] == ["[0]", "[1]"]


def test_a_reminder_of_nothing_is_left_out() -> None:
    nothing = {"role": "system", "content": ""}
    (user,) = messages_of("U")
    assert arrange([nothing, user, nothing], NO_SYSTEM) == [user]
    assert arrange([nothing, user, nothing], ONE_SYSTEM) == [nothing, user]


def test_a_reminder_behind_a_result_leaves_the_reasoning_where_it_was() -> None:
    assert render("Qwen3.5", "SUCTSCTS").startswith(render("Qwen3.5", "SUCTS"))
    assert "(2)" in render("Qwen3.5", "SUCTS")
    # The user asks anew, and the family's models are not shown what was thought before.
    assert "(2)" not in render("Qwen3.5", "SUCTU")


@st.composite
def exchanges(draw: st.DrawFn, *, with_tools: bool) -> list[str]:
    """Draws what the client says before each answer, with the answer before it but for the first."""
    said = st.text("SU", min_size=1, max_size=3)
    exchange = said.map("A".__add__)
    if with_tools:
        exchange |= st.text("TS", max_size=3).map("CT".__add__)
    first = draw(st.text("S", max_size=2)) + "U" + draw(st.text("SU", max_size=2))
    return [first, *draw(st.lists(exchange, min_size=1, max_size=4))]


@pytest.mark.parametrize("name", STRICT)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_conversation_is_taken_and_begins_the_next_one(name: str, data: st.DataObject) -> None:
    kinds, before = "", ""
    for exchange in data.draw(exchanges(with_tools=name in WITH_TOOLS)):
        kinds += exchange
        rendered = render(name, kinds, thinks=False)
        assert rendered.startswith(before), kinds
        before = rendered
        places = [rendered.find(f"[{number}]") for number in range(len(kinds))]
        assert -1 not in places, kinds
        assert places == sorted(places), kinds


def test_a_refused_conversation_is_refused_as_before() -> None:
    with pytest.raises(BlockyardError, match="must alternate"):
        render("Gemma 2", "AU")
