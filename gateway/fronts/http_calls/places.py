"""Knows where in a body messages and tools stand, for the APIs whose messages or tools are others than the core's."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from blockyard.errors import BlockyardError
from gateway.fronts.http_calls.errors import rename_violations

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from blockyard.contract import chat

_OF_CONVERSATION = re.compile(r"conversation\.(?:messages|tools)\[.*", re.DOTALL)
_OF_TOOL = re.compile(r"conversation\.tools\[(\d+)\](.*)", re.DOTALL)
_OF_MESSAGE = re.compile(r"conversation\.messages\[(\d+)\](?:\.tool_calls\[(\d+)\])?(.*)", re.DOTALL)


class Placed(NamedTuple):
    """A message, where it comes from, and where its calls of tools do: paths in the body."""

    message: chat.Message
    place: str
    calls: Sequence[str] = ()


@contextmanager
def naming_places(
    placed: Callable[[], Sequence[Placed]], tools: Callable[[], Sequence[str]] | None = None
) -> Generator[None]:
    """Renames the messages and tools in an error by their places in the body.

    `placed`: makes the messages of the call. `tools`: makes the paths of its tools, where they are not the core's.
    """
    try:
        yield
    except BlockyardError as error:
        if not any(_OF_CONVERSATION.fullmatch(each.field) for each in error.violations):
            raise
        messages, tool_places = placed(), tools() if tools else None
        raise rename_violations(error, lambda field: _place_of(field, messages, tool_places)) from None


def _place_of(field: str, messages: Sequence[Placed], tools: Sequence[str] | None) -> str:
    if found := _OF_TOOL.fullmatch(field):
        return field if tools is None else tools[int(found[1])] + found[2]
    if found := _OF_MESSAGE.fullmatch(field):
        message, call, rest = messages[int(found[1])], found[2], found[3]
        # All calls of a message stand in its content.
        return message.calls[int(call)] + rest if call else message.place + rest.replace(".tool_calls", ".content")
    return field
