"""Writes grammar rules for tool arguments between tags, from the tool's schema: texts unquoted, all else as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from blockyard.errors import Reason, Violation, invalid
from gateway.dialects.schemas import Schema, resolve, type_of, types_of
from gateway.grammars.expressions import json_expression, quote

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gateway.dialects.answer_parser import ToolSchema
    from gateway.dialects.dialect import Calls
    from gateway.grammars.grammar import Grammar

_STRING = frozenset({"string"})
# Keywords that do not constrain a value beyond its type.
_PLAIN = frozenset({"type", "title", "description", "default", "examples"})
_LENGTHS = frozenset({"minLength", "maxLength"})
_CHOICES = frozenset({"const", "enum"})
# The depth to which branches and references are followed: a schema may refer to itself.
_MAX_DEPTH = 8


class _Branches(NamedTuple):
    """The alternatives of a schema.

    Attributes:
        texts: alternatives that may be texts.
        others: alternatives that may be values of other types.
        beside: keywords next to `anyOf`, `oneOf` or `$ref`, which apply to all branches.
    """

    texts: list[Schema]
    others: list[Schema]
    beside: set[str]

    @property
    def choices(self) -> list[str] | None:
        """The texts, if the schema lists all of them; else None."""
        if not all(_CHOICES & branch.keys() for branch in self.texts):
            return None
        values = (value for branch in self.texts for value in _choices_of(branch))
        return [value for value in values if isinstance(value, str)]

    def find_keywords(self, branches: Iterable[Schema], known: frozenset[str]) -> list[str]:
        """Lists the keywords of some branches, and those beside them, that are not in `known`; sorted."""
        return sorted(self.beside.union(*(branch.keys() for branch in branches)) - known)


def _choices_of(branch: Schema) -> list[object]:
    choices = [branch["const"]] if "const" in branch else branch["enum"]
    return cast("list[object]", choices) if isinstance(choices, list) else []


class Tags:
    """Writes the rules of one tool's arguments.

    Args:
        grammar: the grammar that the rules are added to.
        calls: the dialect's calls, of style TAGS.
        number: the tool's index, for the names of its rules.
        tool: the tool. Keywords that cannot be enforced are refused if it is strict, and ignored otherwise.
        schema: the schema of the tool's parameters.
    """

    def __init__(self, grammar: Grammar, calls: Calls, number: int, tool: ToolSchema, schema: Schema) -> None:
        self._grammar = grammar
        self._calls = calls
        self._number = number
        self._tool = tool
        self._schema = schema
        self._shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}

    def arguments(self) -> str:
        """Adds a rule for each argument, and returns the expression for all of them, in the schema's order.

        Raises BlockyardError UNSUPPORTED_PARAMETER for a strict tool whose texts cannot be constrained as it asks.
        """
        properties: Schema = self._schema.get("properties") or {}
        if not properties and self._schema.get("additionalProperties", "properties" not in self._schema) is not False:
            return self._free()
        required: list[str] = self._schema.get("required") or []
        expressions: list[str] = []
        for place, (key, part) in enumerate(properties.items()):
            forms = self._forms(f"text_{self._number}_{place}", key, part)
            if not forms:
                # The schema allows no value for this argument: the call leaves it out.
                continue
            name = self._grammar.add(f"argument_{self._number}_{place}", " | ".join(forms))
            expressions.append(name if key in required else f"{name}?")
        return " ".join(expressions)

    def _forms(self, name: str, key: str, part: Any) -> list[str]:
        types = types_of(self._schema, key)
        if "string" not in types:
            return [self._json(key, part)]
        branches = self._branches(part)
        texts, others, _ = branches
        if (choices := branches.choices) is not None:
            known = [self._choice(key, choices)] if choices else []
            return known + ([self._json(key, {"anyOf": others})] if others else [])
        may_be_json = bool(others and self._calls.typed.json)
        if others and not may_be_json:
            # One rule for any text serves both: the scanner reads JSON of an allowed type as that type.
            self._require(key, branches.find_keywords([*texts, *others], _PLAIN))
            return [self._text(name, key)]
        follows_lengths = len(texts) == 1
        self._require(key, branches.find_keywords(texts, _PLAIN | _LENGTHS if follows_lengths else _PLAIN))
        text = self._text(name, key, texts[0] if follows_lengths else {})
        return [text, self._json(key, {"anyOf": others})] if may_be_json else [text]

    def _require(self, key: str, keywords: list[str]) -> None:
        """Refuses unsupported keywords in the schema of a strict tool."""
        if self._tool.strict and keywords:
            description = (
                f"the keyword {keywords[0]} of tool {self._tool.name!r} cannot be enforced, "
                f"since {key!r} stands between tags"
            )
            raise invalid([Violation("conversation.tools", description, Reason.UNSUPPORTED_PARAMETER)])

    def _branches(self, part: Schema) -> _Branches:
        beside: set[str] = set()
        texts: list[Schema] = []
        others: list[Schema] = []
        for branch in self._walk(part, beside, set(), 0):
            types = types_of({"properties": {"": branch}, **self._shared}, "")
            if types == _STRING:
                texts.append(branch)
            elif "string" not in types:
                others.append(branch)
            else:
                # The branch allows texts and other values, which cannot be separated here.
                texts.append({})
                others.append(branch)
        return _Branches(texts, others, beside - _PLAIN)

    def _walk(self, part: Any, beside: set[str], followed: set[str], depth: int) -> Iterator[Schema]:
        """Yields the innermost branches of a schema, and adds the keywords next to branches to `beside`.

        `followed`: the references followed so far; the target of each is only yielded once.
        """
        branch = cast("Schema", part if isinstance(part, dict) else {})
        types = branch.get("type")
        inner = [] if depth == _MAX_DEPTH or isinstance(types, str) else _inner_of(branch, self._schema)
        if _CHOICES & branch.keys() and not isinstance(types, str):
            values = [value for value in _choices_of(branch) if types is None or _is_of(value, types)]
            split = ([value for value in values if isinstance(value, str) is is_text] for is_text in (True, False))
            yield from ({"enum": each} for each in split if each)
        elif isinstance(types, list):
            yield from ({**branch, "type": each} for each in cast("list[object]", types))
        elif inner:
            beside |= branch.keys() - {"$ref", "anyOf", "oneOf"}
            if isinstance(reference := branch.get("$ref"), str):
                inner = [] if reference in followed else inner
                followed.add(reference)
            for each in inner:
                yield from self._walk(each, beside, followed, depth + 1)
        else:
            yield branch

    def _around(self, key: str, *, is_text: bool) -> tuple[str, str]:
        """Returns the fixed texts before a value, beginning with the argument's name, and after it."""
        calls = self._calls
        line = "\n" if calls.trims_lines else ""
        begin = f"\n{calls.value.begins[0]}" if calls.value.begins else line
        key_end = (calls.typed.text if is_text else calls.typed.json) or calls.key.ends[0]
        return f"{key}{key_end}{begin}", f"{line}{calls.value.ends[0]}{calls.template.parameter}"

    def _json(self, key: str, part: Any) -> str:
        before, end = self._around(f"{self._calls.key.begins[0]}{key}", is_text=False)
        part = {**part, **self._shared} if isinstance(part, dict) else part
        return f"{self._grammar.literal(before)} {json_expression(json.dumps(part))} {self._grammar.literal(end)}"

    def _choice(self, key: str, choices: list[str]) -> str:
        before, end = self._around(f"{self._calls.key.begins[0]}{key}", is_text=True)
        texts = " | ".join(dict.fromkeys(map(quote, choices)))
        return f"{self._grammar.literal(before)} ({texts}) {self._grammar.literal(end)}"

    def _text(self, name: str, key: str, branch: Schema | None = None) -> str:
        before, end = self._around(f"{self._calls.key.begins[0]}{key}", is_text=True)
        least, most = (branch or {}).get("minLength"), (branch or {}).get("maxLength")
        length = (int(least or 0), None if most is None else int(most))
        return f"{self._grammar.literal(before)} {self._grammar.until(name, end, length)}"

    def _free(self) -> str:
        """Adds a rule for an argument of any name, and returns the expression for any number of such arguments."""
        grammar = self._grammar
        before, end = self._around("", is_text=True)
        value = f"{grammar.literal(before)} {grammar.until(f'text_{self._number}', end)}"
        if self._calls.typed.json:
            before, end = self._around("", is_text=False)
            value = f"({value} | {grammar.literal(before)} {json_expression('{}')} {grammar.literal(end)})"
        key = f"{grammar.literal(self._calls.key.begins[0])} /[A-Za-z_][A-Za-z0-9_.-]{{0,63}}/"
        return f"{grammar.add(f'argument_{self._number}', f'{key} {value}')}*"


def _is_of(value: object, types: Any) -> bool:
    return type_of(value) in types or (type_of(value) == "integer" and "number" in types)


def _inner_of(branch: Schema, schema: Schema) -> list[object]:
    """Returns the target of a schema's `$ref`, or the branches of its `anyOf` and `oneOf`; empty if it has none."""
    if isinstance(reference := branch.get("$ref"), str):
        return [resolve(reference, schema)]
    found = [branch.get(name) for name in ("anyOf", "oneOf")]
    return [each for branches in found if isinstance(branches, list) for each in cast("list[object]", branches)]
