from __future__ import annotations

import re

import pytest

from blockyard.errors import BlockyardError, Reason
from gateway.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": '<ho> & "ü"'}]


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(**{"messages": MESSAGES, "tools": None, **variables})


def test_blocks_are_trimmed_and_text_is_not_escaped() -> None:
    source = """{{ bos_token }}
{% for m in messages %}
    {% if true %}
[{{ m.role }}] {{ m['content'] }}
    {% endif %}
{% endfor %}"""
    assert render(source) == '<s>\n[user] hi\n[assistant] <ho> & "ü"\n'


def test_loop_controls_work() -> None:
    assert render("{% for m in messages %}{% if loop.index0 %}{% break %}{% endif %}{{ m.role }}{% endfor %}") == "user"


def test_json_keeps_characters_and_can_be_indented() -> None:
    assert render("{{ messages[1] | tojson }}") == '{"role": "assistant", "content": "<ho> & \\"ü\\""}'
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_the_generation_tag_renders_its_body() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %};{% endfor %}"
    assert render(source) == "user;assistant;"


def test_the_date_can_be_asked_for() -> None:
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))


def test_variables_of_the_request_reach_it() -> None:
    assert render("{{ enable_thinking }} {{ tools | length }}", enable_thinking=False, tools=[1, 2]) == "False 2"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 3 }}", "str"),
        ("{{ nothing.at.all }}", "nothing"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ range(10**9) | list }}", "too big"),
    ],
)
def test_a_template_that_refuses_is_the_requests_fault(source: str, told: str) -> None:
    with pytest.raises(BlockyardError) as raised:
        render(source)
    assert raised.value.reason is Reason.FIELD_INVALID
    assert raised.value.violations[0].field == "conversation.messages"
    assert told in raised.value.message.lower()


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 6_000 + ")" * 6_000 + " }}",
        "{% if x %}" * 6_000 + "{% endif %}" * 6_000,
        # Python compiles no more than some twenty loops within each other.
        "{% for x in messages %}" * 100 + "{% endfor %}" * 100,
    ],
    ids=["parentheses", "conditions", "loops"],
)
def test_a_template_that_is_nested_too_deep_is_refused(source: str) -> None:
    with pytest.raises(BlockyardError, match="nested too deep") as caught:
        render(source)
    assert caught.value.reason is Reason.MODEL_NOT_LOADED
