"""Maps the core's messages and tools to paths in the body, for APIs whose messages or tools differ from the core's."""

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
    """A message, with the paths in the body of the message (`place`) and of its tool calls (`calls`)."""

    message: chat.Message
    place: str
    calls: Sequence[str] = ()


@contextmanager
def naming_places(
    placed: Callable[[], Sequence[Placed]], tools: Callable[[], Sequence[str]] | None = None
) -> Generator[None]:
    """Renames the messages and tools in a BlockyardError to their paths in the body.

    `placed`: returns the messages of the call. `tools`: returns the paths of its tools; None: as in the core.
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
        # In the body, a message's content contains its calls.
        return message.calls[int(call)] + rest if call else message.place + rest.replace(".tool_calls", ".content")
    return field
