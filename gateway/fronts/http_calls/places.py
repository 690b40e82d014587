"""Knows where in a body the messages of a conversation stand, where an API's messages are others than the core's."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from blockyard.errors import BlockyardError
from gateway.fronts.http_calls.errors import rename_violations

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from gateway import chat

_OF_MESSAGE = re.compile(r"conversation\.messages\[(\d+)\](?:\.tool_calls\[(\d+)\])?(.*)", re.DOTALL)


class Placed(NamedTuple):
    """A message, where it comes from, and where its calls of tools do: paths in the body."""

    message: chat.Message
    place: str
    calls: Sequence[str] = ()


@contextmanager
def told_by(placed: Callable[[], Sequence[Placed]]) -> Generator[None]:
    """Names the messages that an error is about by their places in the body. `placed`: makes those of the call."""
    try:
        yield
    except BlockyardError as error:
        if not any(_OF_MESSAGE.fullmatch(each.field) for each in error.violations):
            raise
        messages = placed()
        raise rename_violations(error, lambda field: _place_of(field, messages)) from None


def _place_of(field: str, messages: Sequence[Placed]) -> str:
    found = _OF_MESSAGE.fullmatch(field)
    if found is None:
        return field
    message, call, rest = messages[int(found[1])], found[2], found[3]
    # All calls of a message stand in its content.
    return message.calls[int(call)] + rest if call else message.place + rest.replace(".tool_calls", ".content")
