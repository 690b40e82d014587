"""Reads calls of tools in each style, from behind the marker that begins them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.dialects.dialect import Style
from gateway.dialects.literal_calls import read_gemma, read_python
from gateway.dialects.object_calls import read_headed, read_objects
from gateway.dialects.tag_calls import read_tags

if TYPE_CHECKING:
    from collections.abc import Generator

    from gateway.dialects.dialect import Calls
    from gateway.dialects.feed import CallSink, Feed

_READERS = {
    Style.OBJECT: read_objects,
    Style.HEADED: read_headed,
    Style.TAGS: read_tags,
    Style.PYTHONIC: read_python,
    Style.GEMMA: read_gemma,
}


def read_calls(feed: Feed, calls: Calls, sink: CallSink) -> Generator[None, None, None]:
    """Reads adjacent calls; raises NotACall where there is none or one is malformed: the rest is text then."""
    yield from _READERS[calls.style](feed, calls, sink)
