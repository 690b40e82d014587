"""Describes how a family of models writes reasoning and calls of tools. Knows no requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Style(Enum):
    """How a call says its tool's name and arguments."""

    OBJECT = "object"
    """A JSON object, or a list of such: `{"name": "f", "arguments": {"x": 1}}`."""
    HEADED = "headed"
    """A header with the name, then the arguments as a JSON object. What begins like an OBJECT is one."""
    TAGS = "tags"
    """The name, then a key and a value for each argument, each between markers; a text is not quoted."""
    PYTHONIC = "pythonic"
    """A list of Python calls: `[f(x=1), g()]`."""
    GEMMA = "gemma"
    """A header, then an object with bare keys, whose texts stand between markers: `call:f{x:<escape>a<escape>}`."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of an answer. `begins` and `ends`: markers, of which each serves."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]


class TypedEnds(NamedTuple):
    """What ends an argument's name before a text, and before JSON."""

    text: str
    json: str


_UNTYPED = TypedEnds("", "")


@dataclass(frozen=True, slots=True)
class CallForm:
    """What a model is held to that has to call: the texts around the calls, and those around a name and its arguments.

    `separator`: None where it may call once alone. `parameter`: of TAGS, what stands behind each argument.
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
    """How calls are written.

    Attributes:
        begins: what a call begins with.
        ends: what ends it.
        style: what is between.
        form: what grammars allow of all this.
        starts: what a call begins with that stands where the answer begins, the prompt having the rest of its marker.
        bare: a call may also stand where the answer begins, without a marker.
        header: of HEADED and GEMMA, an expression for all that is before the arguments, with a group `name` and perhaps
            an `id`.
        inner: markers within it.
        name_ends: of TAGS, what ends the name; none: what comes behind it.
        key: of TAGS, the markers around an argument's name.
        value: of TAGS, those around its value; the first may be none.
        typed: of TAGS, where the model says what a value is, whatever the schema says.
        trims_lines: of TAGS, whether a value has a line of its own.
        quote: of GEMMA, the marker around texts.
        dropped: what may stand around calls and means nothing.
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    style: Style
    form: CallForm
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
    """How a family of models answers.

    Attributes:
        name: for `--dialect`.
        seen_in: what the chat templates of the family contain: all texts of one of these.
        reasoning: the markers around what the model thinks.
        calls: how it calls tools.
        reasons_anywhere: whether reasoning begins wherever its marker stands, not at the beginning alone.
        dropped: markers that mean nothing to a reader.
        behind_reasoning: what stands behind it, before anything else.
        before_text: what stands before a text.
        call_id: what the id of a call is made of: `digest`, `name`, `index`.
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
        """Returns all texts that a tokenizer may have as special tokens."""
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
class Speech:
    """How a model speaks.

    Attributes:
        dialect: its own.
        reasoning_is_open: the prompt ends where it begins to think.
        special_ids: ids of its special tokens by their texts: no other tokens can spell these.
        may_think: it may begin with thoughts; always where reasoning is open.
    """

    dialect: Dialect
    reasoning_is_open: bool = False
    special_ids: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)
    may_think: bool = True
