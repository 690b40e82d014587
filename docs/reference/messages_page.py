"""Writes the page of every message from the product's syntax trees. Run `generate.py`, which imports this."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from messages_source import Scope, Source
from messages_texts import Texts

from blockyard.errors import TABLE, Reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[2]
PACKAGES = ("blockyard", "gateway", "scheduler_service", "worker_service", "blockyard_kernels")
START, LIBRARY, HTTP, INTERNAL = "start", "library", "http", "internal"

# Where a message and its reason stand in calls: their names, or a reason that all of them have.
SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "BlockyardError": ("reason", "message"),
    "EventsLost": ("reason", "message"),
    "Violation": ("field", "message", "reason"),
}
RENAMED = {"description": "message"}


class Kind(NamedTuple):
    """Of an exception with a text: the group of its messages, and which argument is the text."""

    group: str
    place: int = 0


KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(
        (
            "SettingsError",
            "CertificateError",
            "KeyFileError",
            "PortTaken",
            "StartError",
            "DoesNotFit",
            "TracingUnavailable",
            "MissingPackages",
            "BadParameter",
            "SystemExit",
            "exit",
            "error",
        ),
        Kind(START),
    ),
    **dict.fromkeys(("NotReady", "Misconfigured", "Unreachable"), Kind(Reason.NO_READY_WORKER)),
    "NeverFits": Kind(Reason.NEVER_FITS),
    "_Malformed": Kind(Reason.FIELD_INVALID),
    "_TooComplexError": Kind(Reason.GRAMMAR_TOO_COMPLEX),
    "PydanticCustomError": Kind(Reason.FIELD_INVALID, 1),
    "unsupported": Kind(Reason.UNSUPPORTED_PARAMETER),
    "HTTPException": Kind(HTTP, 1),
    **dict.fromkeys(("ValueError", "TypeError"), Kind(LIBRARY)),
    **dict.fromkeys(
        (
            "StepMismatch",
            "PackError",
            "TilesRefused",
            "ExtensionPanic",
            "OutOfMemoryError",
            "RuntimeError",
            "IndexError",
            "TimeoutError",
            "NotImplementedError",
        ),
        Kind(INTERNAL),
    ),
}

# Errors between the services, or about code: whatever raises them, no client gets them.
INTERNAL_REASONS = frozenset({Reason.WRONG_STATE, Reason.GROUP_BROKEN})

# What an error says that is made of another one, whose words are listed where they stand.
PASSED_ON = frozenset({"message", "description", "problem", "readiness_message"})


@dataclass(frozen=True, order=True)
class Message:
    """What a person may read. `place`: the field that it is about, or nothing."""

    group: str
    package: str
    place: str
    text: str


class Found(NamedTuple):
    """The messages, and the calls whose words were not found: module, line, function and expression."""

    messages: frozenset[Message]
    unresolved: frozenset[tuple[str, int, str, str]]


@cache
def find_messages(root: Path) -> Found:
    """Reads every message from the packages below a folder."""
    source = Source(root, PACKAGES)
    finder = _Finder(Texts(source))
    for call, scope in source.calls:
        finder.read(call, scope)
    return Found(frozenset(finder.messages), frozenset(finder.unresolved))


class _Finder:
    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self.messages: set[Message] = set()
        self.unresolved: set[tuple[str, int, str, str]] = set()

    def read(self, call: ast.Call, scope: Scope) -> None:
        """Takes the messages of a call, if it makes an error."""
        name = _name_of(call, scope)
        if name in SIGNATURES:
            given = dict(zip(SIGNATURES[name], call.args, strict=False))
            given |= {RENAMED.get(word.arg, word.arg): word.value for word in call.keywords if word.arg}
            self._add(given, None, call, scope)
        elif name == "Neutral":
            words = {word.arg: word.value for word in call.keywords if word.arg == "message"}
            if words:
                self._add(words, Reason.UNSUPPORTED_PARAMETER, call, scope)
        elif name in KINDS and len(call.args) > KINDS[name].place:
            text = call.args[KINDS[name].place]
            makes_text = isinstance(call.func, ast.Name) and any(
                function.name == "__init__" for function, _ in self._texts.source.functions_of(call, scope)
            )
            is_status = isinstance(text, ast.Constant) and not isinstance(text.value, str)
            if makes_text or is_status or (name == "exit" and isinstance(text, ast.Call)):
                return
            self._add({"message": _filled(text, call)}, _group_of(name, call, scope), call, scope)

    def _add(self, given: Mapping[str, ast.expr], group: str | None, call: ast.Call, scope: Scope) -> None:
        text, reason, field = given.get("message"), given.get("reason"), given.get("field")
        if text is None or _is_passed_on(text):
            return
        is_open = group is None and reason is not None and not isinstance(reason, ast.Attribute)
        for bound in self._texts.bound(scope, [text, reason, field], forced=is_open):
            said = self._texts.of(text, bound)
            if said is None:
                if not any(_is_passed_on(node) for node in self._origins(text, bound)):
                    function = scope.function.name if scope.function else ""
                    self.unresolved.add((scope.module.name, call.lineno, function, ast.unparse(text)))
                continue
            groups = [group] if group else self._reasons(reason, bound)
            fields = self._texts.of(field, bound) if field is not None else None
            package = scope.module.name.partition(".")[0]
            self.messages |= {
                Message(_shown_group(each), package, place, " ".join(one.split()))
                for each in groups
                for place in (fields or [""])
                for one in said
                # What ends so is a heading of another message.
                if one.strip() and not one.strip().endswith(":")
            }

    def _origins(self, node: ast.expr, scope: Scope) -> Iterator[ast.expr]:
        """Yields an expression, and those that a name in it has from a caller or in its function."""
        yield node
        if isinstance(node, ast.Name):
            for value, home in self._texts.values(node.id, scope):
                if value is not node:
                    yield from self._origins(value, home)

    def _reasons(self, node: ast.expr | None, scope: Scope) -> list[Reason]:
        if node is None:
            return [Reason.FIELD_INVALID]
        found = {Reason(part.attr) for part in ast.walk(node) if _is_reason(part)}
        if not found:
            names = [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
            for name in names:
                for value, home in self._texts.values(name, scope):
                    found |= (
                        {*self._reasons(value, home)} if not isinstance(value, ast.Name) or value.id != name else set()
                    )
        return sorted(found)


def _is_reason(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="Reason"), attr=name):
            return name in Reason.__members__
    return False


def _is_passed_on(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="str"), args=[ast.Name()]):
            return True
        case ast.Attribute(attr=name):
            return name.strip("_") in PASSED_ON
    return False


def _name_of(call: ast.Call, scope: Scope) -> str:
    """Returns the class or function of a call; of `super().__init__` the class that it stands in, or its base."""
    match call.func:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__"):
            for node in scope.module.classes.values():
                if scope.function in node.body:
                    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                    return next((base for base in bases if base in SIGNATURES), node.name)
        case ast.Attribute(value=ast.Name(id=owner), attr="error" | "exit" as name):
            return name if owner in ("parser", "sys") else ""
        case ast.Attribute(attr=name):
            return name
    return ""


def _filled(text: ast.expr, call: ast.Call) -> ast.expr:
    """Returns what fills a template of pydantic's that is one hole."""
    match call.args[-1], text:
        case ast.Dict(keys=[ast.Constant(value=str(key))], values=[value]), ast.Constant(value=str(template)):
            return value if template == f"{{{key}}}" else text
    return text


def _group_of(name: str, call: ast.Call, scope: Scope) -> str:
    package = scope.module.name.partition(".")[0]
    if name == "PydanticCustomError" and isinstance(call.args[0], ast.Name):
        return Reason.UNSUPPORTED_PARAMETER
    if KINDS[name].group == LIBRARY and package != "blockyard":
        return INTERNAL
    return KINDS[name].group


def _shown_group(group: str) -> str:
    return INTERNAL if group in INTERNAL_REASONS else group


PAGE = """\
# Messages
{note}

Every message that Blockyard can show, as the code has it: by the [reason of the error](errors.md), then by the part of
Blockyard that writes it. `{{name}}` stands for what a run fills in. A message about a field of a request begins with
the field's name: `sampling.top_p: must be above 0 and at most 1, not 7.0`. Fields have their names of the proto here;
over HTTP the same message has the parameter's name, such as `top_p`.

To find a message, search the page for its words without numbers and names. What helps stands at the head of its group,
and in the message itself where that is not enough. The words of the system, of pydantic and of llguidance, which some
messages quote, are not listed.

{contents}

{groups}
"""

PARTS = {
    "blockyard": "What all parts share: client library, command line, model files",
    "gateway": "The gateway",
    "scheduler_service": "The scheduler",
    "worker_service": "A worker",
    "blockyard_kernels": "The kernels",
}

# The groups that have no reason: their title, what they are, and what helps.
OTHERS = {
    START: (
        "Settings, files and the command line",
        "A process or a command does not start: a setting, a file, a port or a package is not as it has to be.",
        "Correct what the message names. `--print-config` shows what a process has understood.",
    ),
    HTTP: (
        "HTTP",
        "An address or a body that no call has. The answer has the status that HTTP has for it (404, 405, 415).",
        "Look at [the OpenAI API](openai.md) and [the Messages and Responses APIs](agents.md).",
    ),
    LIBRARY: (
        "The Python library",
        "A call of `blockyard` got a wrong argument. It raises `TypeError` or `ValueError`, before anything is sent.",
        "Correct the argument that the message names.",
    ),
    INTERNAL: (
        "Not for clients",
        "No client sees these. They pass between the services (`WRONG_STATE`, `GROUP_BROKEN`), stand in a log, or "
        "answer an operator whose call has to wait for another state.",
        "An operator does what the message says; whoever finds one of the others in a log reports it.",
    ),
}


def _escaped(text: str) -> str:
    for mark in "\\|*<`[]":
        text = text.replace(mark, f"\\{mark}")
    return text


def _rows(messages: list[Message]) -> list[str]:
    places: dict[str, list[str]] = {}
    for message in messages:
        places.setdefault(message.text, []).append(message.place)
    rows = sorted((sorted({*where}), text) for text, where in places.items())
    return [f"| {', '.join(f'`{each}`' for each in where if each)} | {_escaped(text)} |" for where, text in rows]


def _group(title: str, meaning: str, help_text: str, messages: list[Message]) -> str:
    lines = [f"## {title}", "", f"{meaning} **What helps:** {help_text}", ""]
    for package, name in PARTS.items():
        if some := [message for message in messages if message.package == package]:
            lines += [f"### {name}", "", "| field | message |", "|---|---|", *_rows(some), ""]
    return "\n".join(lines)


def messages_page(note: str, meanings: Mapping[Reason, tuple[str, str]]) -> str:
    """Returns the page. `meanings`: what each reason means, and what helps."""
    heads = {reason: (reason, *meanings[reason]) for reason in TABLE} | OTHERS
    found = sorted(find_messages(ROOT).messages)
    groups = {key: [message for message in found if message.group == key] for key in heads}
    shown = [key for key in heads if groups[key]]
    titles = [heads[key][0] for key in shown]
    contents = " · ".join(f"[{title}](#{title.lower().replace(' ', '-').replace(',', '')})" for title in titles)
    parts = [_group(*heads[key], groups[key]) for key in shown]
    return PAGE.format(note=note, contents=contents, groups="\n".join(parts).rstrip())
