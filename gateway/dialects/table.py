"""Lists the dialects, and chooses one by a model's chat template. A new family is one entry."""

from __future__ import annotations

from gateway.dialects.dialect import Calls, Dialect, Span, Style

_THINK = Span(("<think>",), ("</think>",))

# Where the texts of several are in one template, the first counts: the most specific come first.
DIALECTS = (
    Dialect(
        "hermes",
        seen_in=(("<tool_call>", '"arguments"'), ("<tool_call>", "tool_call.arguments")),
        reasoning=_THINK,
        calls=Calls(("<tool_call>",), ("</tool_call>",), Style.OBJECT),
    ),
)
BY_NAME = {dialect.name: dialect for dialect in DIALECTS}
"""Returns a dialect by its name."""


def find_dialect(template: str) -> Dialect | None:
    """Finds the dialect that a chat template speaks; None where it speaks none of these."""
    for dialect in DIALECTS:
        if any(all(text in template for text in texts) for texts in dialect.seen_in):
            return dialect
    return None
