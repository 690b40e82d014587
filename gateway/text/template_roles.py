"""Finds the orders of roles that a chat template accepts, and rearranges messages into one of them.

Clients send system messages anywhere; some templates refuse or drop system messages that are not first, and some
require the user and the assistant to alternate. When a template is loaded, small conversations are rendered to find the
orders that it accepts. The new place of a message depends only on the messages before it, so that each prompt remains a
prefix of the conversation's next prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blockyard.errors import BlockyardError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Json = dict[str, Any]

_PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
_FUNCTION = {"name": "look_up", "description": "Looks it up.", "parameters": _PARAMETERS}
_TOOLS: list[Json] = [{"type": "function", "function": _FUNCTION}]
# Some templates want ids of nine letters and digits.
_CALL_ID = "a1b2c3d4e"
_CALL: Json = {"id": _CALL_ID, "type": "function", "function": {"name": "look_up", "arguments": {"place": "here"}}}
# Conversations by the first letters of their roles; C is an answer that thinks and calls a tool, T the tool's result.
_WITH_SYSTEM = ("SU", "SUAU", "SUCT")
_WITH_LATER_SYSTEM = ("SUS", "US", "SSU", "SUAS", "SUASU", "UASU", "SUSAUS", "SUCTS")


@dataclass(frozen=True, slots=True)
class TemplateRoles:
    """The orders of roles that a chat template accepts.

    Attributes:
        takes_system: whether it writes a system message at the beginning, in its place.
        takes_later_system: whether it writes a system message anywhere, in its place.
        takes_turns_in_a_row: whether the user, or the assistant, may have two messages in a row.
        takes_user_behind_tool: whether a user's message may follow a tool's result.
        keeps_turns_before_user: whether earlier messages are rendered the same if a user's message follows a tool's
            result; false if the template then removes the reasoning of the answer that called the tool.
    """

    takes_system: bool = True
    takes_later_system: bool = True
    takes_turns_in_a_row: bool = True
    takes_user_behind_tool: bool = True
    keeps_turns_before_user: bool = True

    def describe(self) -> str:
        """Describes how messages are rearranged for the template; an empty text if it accepts all orders."""
        return "; ".join(self._find_changes())

    def _find_changes(self) -> Iterator[str]:
        if not self.takes_system:
            yield "the first system message goes into the first user turn"
        if not self.takes_later_system:
            yield "later system messages become <system-reminder> in user turns"
        if not self.takes_turns_in_a_row:
            yield "turns of one role in a row become one"
        if not self.takes_user_behind_tool:
            yield "a user turn behind a tool's result goes into the result"
        elif not (self.takes_later_system or self.keeps_turns_before_user):
            yield "a reminder behind a tool's result goes into the result, which keeps the reasoning before it"


def find_roles(render: Callable[..., str]) -> TemplateRoles:
    """Renders small conversations to find which of them a template accepts.

    A template that refuses every conversation, or writes no message's text, is treated as accepting all.

    Args:
        render: renders a template with `messages`, `tools` and `add_generation_prompt`, or raises BlockyardError.
    """
    probe = _Probe(render)
    if not probe.takes("U", "UAU"):
        return TemplateRoles()
    takes_system = probe.takes(*_WITH_SYSTEM)
    takes_user_behind_tool = probe.takes("UCTU")
    return TemplateRoles(
        takes_system=takes_system,
        takes_later_system=takes_system and probe.takes(*_WITH_LATER_SYSTEM),
        takes_turns_in_a_row=probe.takes("UU", "UAUU"),
        takes_user_behind_tool=takes_user_behind_tool,
        keeps_turns_before_user=not takes_user_behind_tool or probe.keeps("UCT", "UCTU"),
    )


class _Probe:
    """Renders test conversations, with and without tools if the template accepts both."""

    def __init__(self, render: Callable[..., str]) -> None:
        self._render_template = render
        self._tools = [tools for tools in (None, _TOOLS) if self._writes("U", tools)]
        self._calls_tools = _TOOLS in self._tools and self._writes("UCT", _TOOLS)

    def takes(self, *conversations: str) -> bool:
        """Returns whether the template writes the texts of conversations in their order.

        Conversations with tool calls are ignored if the template does not support tool calls.
        """
        return bool(self._tools) and all(
            self._writes(roles, tools)
            for roles in conversations
            for tools in (self._tools if "C" not in roles else [_TOOLS] * self._calls_tools)
        )

    def keeps(self, conversation: str, longer: str) -> bool:
        """Returns whether the prompt up to a conversation's last text is the same in a longer conversation."""
        if not self._calls_tools:
            return True
        short, long = self._render(conversation, _TOOLS), self._render(longer, _TOOLS)
        last = _text(len(conversation) - 1)
        return short is not None and long is not None and long.startswith(short[: short.rindex(last) + len(last)])

    def _writes(self, roles: str, tools: list[Json] | None) -> bool:
        rendered = self._render(roles, tools)
        if rendered is None:
            return False
        texts = (_text(number) for number, role in enumerate(roles) if role != "C")
        places = [rendered.find(text) for text in texts]
        return -1 not in places and places == sorted(places)

    def _render(self, roles: str, tools: list[Json] | None) -> str | None:
        messages = [_make_message(role, _text(number)) for number, role in enumerate(roles)]
        try:
            return self._render_template(messages=messages, tools=tools, documents=None, add_generation_prompt=False)
        except BlockyardError:
            return None


def _text(number: int) -> str:
    return f"probe-{number}-text"


def _make_message(role: str, text: str) -> Json:
    match role:
        case "C":
            return {"role": "assistant", "content": "", "reasoning_content": text, "tool_calls": [_CALL]}
        case "T":
            return {"role": "tool", "content": text, "tool_call_id": _CALL_ID, "name": "look_up"}
        case _:
            return {"role": {"S": "system", "U": "user", "A": "assistant"}[role], "content": text}


def arrange(messages: Sequence[Json], roles: TemplateRoles) -> list[Json]:
    """Rearranges messages, in the form for templates, into an order of roles that a template accepts.

    The order of texts stays the same, and messages that the template accepts stay unchanged.
    """
    arranged = list(messages)
    if roles == TemplateRoles():
        return arranged
    num_leading = next((place for place, each in enumerate(arranged) if each["role"] != "system"), len(arranged))
    leading, rest = arranged[:num_leading], arranged[num_leading:]
    turns = [[each] for each in leading] if roles.takes_later_system else _begin(leading, rest, roles)
    for message in rest:
        is_reminder = message["role"] == "system" and not roles.takes_later_system
        if is_reminder and not message["content"]:
            continue
        part = _make_reminder(message) if is_reminder else message
        if turns and _joins(turns[-1], part, roles, is_reminder=is_reminder):
            turns[-1].append(part)
        else:
            turns.append([part])
    return [_join(parts) for parts in turns]


def _begin(leading: list[Json], rest: list[Json], roles: TemplateRoles) -> list[list[Json]]:
    """Joins the leading system messages into one turn; a user turn if the template accepts no system messages.

    A user turn also takes the first message out of `rest` if that is the user's.
    """
    if not leading:
        return []
    if roles.takes_system:
        return [leading]
    turn = [{"role": "user", "content": each["content"]} for each in leading]
    return [[*turn, rest.pop(0)] if rest and rest[0]["role"] == "user" else turn]


def _make_reminder(message: Json) -> Json:
    return {"role": "user", "content": f"<system-reminder>\n{message['content']}\n</system-reminder>"}


def _joins(turn: list[Json], part: Json, roles: TemplateRoles, *, is_reminder: bool) -> bool:
    """Returns whether a message becomes a part of the turn before it."""
    if turn[0]["role"] == "tool":
        stands_alone = roles.takes_user_behind_tool and (roles.keeps_turns_before_user or not is_reminder)
        return part["role"] == "user" and not stands_alone
    speaks_again = turn[0]["role"] == part["role"] and part["role"] in ("user", "assistant")
    return speaks_again and not roles.takes_turns_in_a_row and "tool_calls" not in turn[-1]


def _join(parts: list[Json]) -> Json:
    """Joins several messages into one with the role of the first; blank lines separate their texts."""
    if len(parts) == 1:
        return parts[0]
    fields = {name: value for part in reversed(parts) for name, value in part.items()}
    for name in ("content", "reasoning_content"):
        if texts := [part[name] for part in parts if part.get(name)]:
            fields[name] = "\n\n".join(texts)
    return fields
