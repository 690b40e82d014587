"""The trace of a worker's start: one span for the start, and one for each call that sets the worker up.

A worker that is taken over as it is has no such trace. Knows nothing of the calls.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError
from blockyard.tracing.spans import NO_SPAN, Attribute, Span, begin_root_span, begin_span

if TYPE_CHECKING:
    from collections.abc import Generator


class StartSpans:
    """One attempt to start a worker. Its span begins with the first call."""

    def __init__(self, **attributes: Attribute) -> None:
        self._attributes = attributes
        self._start: Span | None = None

    @contextmanager
    def step(self, name: str) -> Generator[Span]:
        """Around one call, which may add attributes; one that fails ends the span with an error, as it does `all`."""
        if self._start is None:
            self._start = begin_root_span("start-up", **self._attributes)
        span = begin_span(name, self._start.context)
        with _ended(span):
            yield span

    @contextmanager
    def all(self) -> Generator[StartSpans]:
        try:
            yield self
        except BaseException as error:
            self._end(_name_of(error))
            raise
        self._end()

    def _end(self, error: str = "") -> None:
        (self._start or NO_SPAN).end(error=error)


@contextmanager
def _ended(span: Span) -> Generator[None]:
    try:
        yield
    except BaseException as error:
        span.end(error=_name_of(error))
        raise
    span.end()


def _name_of(error: BaseException) -> str:
    """Names what ended a step, or what it came of; who stops in its midst fails at nothing."""
    error = error.__cause__ or error
    if isinstance(error, BlockyardError):
        return str(error.reason)
    return "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__
