"""Describes how a family of models writes reasoning and tool calls. Knows no requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Style(Enum):
    OBJECT = "object"
    """A JSON object or a list of objects: `{"name": "f", "arguments": {"x": 1}}`."""
    HEADED = "headed"
    """A header with the name, then the arguments as a JSON object. A call that begins with a bracket is an OBJECT."""
    TAGS = "tags"
    """The name, then a key and a value for each argument, each between markers; a text is not quoted."""
    PYTHONIC = "pythonic"
    """A list of Python calls: `[f(x=1), g()]`."""
    GEMMA = "gemma"
    """A header, then an object with bare keys, whose texts stand between markers: `call:f{x:<escape>a<escape>}`."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of an answer between two markers. `begins` and `ends`: the alternatives for each of the two."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]


class TypedEnds(NamedTuple):
    """The markers that end an argument's name: before a text value, and before a JSON value."""

    text: str
    json: str


_UNTYPED = TypedEnds("", "")


@dataclass(frozen=True, slots=True)
class CallTemplate:
    """The fixed texts of calls that a grammar forces a model to write.

    Attributes:
        before: the text before a tool's name.
        middle: the text between the name and the arguments.
        after: the text after the arguments.
        separator: the text between two calls; None: the dialect allows only one call.
        opens, shuts: the texts before the first call and after the last one.
        parameter: for TAGS, the text after each argument.
    """

    before: str
    middle: str
    after: str = ""
    separator: str | None = None
    opens: str = ""
    shuts: str = ""
    parameter: str = ""


@dataclass(frozen=True, slots=True)
class Calls:
    """How a dialect writes calls of tools.

    Attributes:
        begins: the alternative markers that begin a call.
        ends: the alternative markers that end a call.
        style: the notation between the two markers.
        template: the one way of writing calls that grammars allow.
        starts: ends of markers that begin a call at the answer's beginning, for prompts that end with a marker's first
            part.
        bare: whether a call may also begin the answer without a marker.
        header: for HEADED and GEMMA, a regular expression for the text between the marker and the arguments, with a
            group `name` and optionally a group `id`.
        inner: markers within a call.
        name_ends: for TAGS, the markers that end the tool's name; empty: the next marker ends it.
        key: for TAGS, the markers around an argument's name.
        value: for TAGS, the markers around an argument's value; `begins` may be empty.
        typed: for TAGS, the ends of argument names by which the model itself marks a value as text or JSON; they take
            precedence over the schema.
        trims_lines: for TAGS, whether one line break on each side of a value is dropped.
        quote: for GEMMA, the marker around texts.
        dropped: markers around calls that carry no meaning and are left out.
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    style: Style
    template: CallTemplate
    starts: tuple[str, ...] = ()
    bare: bool = False
    header: str = ""
    inner: tuple[str, ...] = ()
    name_ends: tuple[str, ...] = ()
    key: Span = Span((), ())
    value: Span = Span((), ())
    typed: TypedEnds = _UNTYPED
    trims_lines: bool = False
    quote: str = ""
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a family of models writes answers. Other servers call this a reasoning parser and a tool parser.

    Attributes:
        name: the name for `--dialect`.
        seen_in: groups of texts; a chat template that contains all texts of one group is of this dialect.
        reasoning: the markers around reasoning; None: the model does not reason.
        calls: how the model calls tools; None: it does not.
        reasons_anywhere: whether reasoning may begin anywhere in the answer; false: only at the answer's beginning.
        dropped: markers that carry no meaning and are left out of the text.
        behind_reasoning: the text between reasoning and anything else.
        before_text: the text before the answer's text.
        call_id: the format of a call's id, with the fields `digest`, `name` and `index`.
    """

    name: str
    seen_in: tuple[tuple[str, ...], ...]
    reasoning: Span | None = None
    calls: Calls | None = None
    reasons_anywhere: bool = False
    dropped: tuple[str, ...] = ()
    behind_reasoning: str = ""
    before_text: str = ""
    call_id: str = "call_{digest:.24}"

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers of the dialect; a tokenizer may have special tokens for them."""
        calls, reasoning = self.calls, self.reasoning
        found = list(self.dropped)
        if reasoning is not None:
            found += reasoning.begins + reasoning.ends
        if calls is not None:
            spans = (*calls.key.begins, *calls.key.ends, *calls.value.begins, *calls.value.ends)
            found += [*calls.begins, *calls.ends, *calls.inner, *calls.name_ends, *spans, *calls.dropped]
            found += [calls.quote] if calls.quote else []
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """The properties of the model and the prompt that the grammar of an answer depends on.

    Attributes:
        dialect: the model's dialect.
        reasoning_is_open: whether the prompt ends with the marker that begins reasoning.
        special_ids: ids of the model's special tokens by their texts; no other tokens can spell these texts.
        may_think: whether the answer may begin with reasoning; true if `reasoning_is_open`.
    """

    dialect: Dialect
    reasoning_is_open: bool = False
    special_ids: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)
    may_think: bool = True
