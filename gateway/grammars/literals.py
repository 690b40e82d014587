"""Writes grammar rules for tool arguments that are Python or Gemma literals, from the tool's schema."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from blockyard.errors import Reason, Violation, invalid
from gateway.dialects.dialect import Calls, Style
from gateway.dialects.schemas import Schema, resolve, type_of
from gateway.grammars.expressions import json_expression

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gateway.dialects.answer_parser import ToolSchema
    from gateway.grammars.grammar import Grammar

_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
# Keywords that llguidance enforces besides types. It refuses other keywords, or they do not constrain a value's form.
_KEYWORDS = frozenset(
    {"$ref", "allOf", "anyOf", "const", "enum", "oneOf"}
    | {"format", "maxLength", "minLength", "pattern"}
    | {"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"}
    | {"additionalItems", "items", "maxItems", "minItems", "prefixItems"}
    | {"additionalProperties", "maxProperties", "minProperties", "patternProperties", "properties", "required"}
)
_LENGTHS = frozenset({"minLength", "maxLength"})
_RANGES = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_FOLLOWED: Mapping[str, frozenset[str]] = {
    "number": _RANGES,
    "integer": _RANGES,
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
# The type that a schema without a type is meant for.
_IMPLIED = {"properties": "object", "additionalProperties": "object", "items": "array"}
_NOTHING = '""'
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class _Notation:
    """The notation of values in calls.

    Attributes:
        equals: separates an argument's name from its value.
        colon: separates an object's key from its value.
        comma: separates two arguments, members or items.
        words: the notations of true, false and null.
        quote: the marker around texts; empty: texts are JSON strings, which Python reads too.
    """

    equals: str
    colon: str
    comma: str
    words: Mapping[object, str]
    quote: str = ""

    def write(self, value: Any, *, is_key: bool = False) -> str:
        match value:
            case bool() | None:
                return self.words[value]
            case str():
                if self.quote and is_key and _WORD.fullmatch(value):
                    return value
                return f"{self.quote}{value}{self.quote}" if self.quote else json.dumps(value, ensure_ascii=False)
            case list():
                return f"[{self.comma.join(map(self.write, cast('list[Any]', value)))}]"
            case dict():
                members = cast("dict[str, Any]", value)
                pairs = (f"{self.write(key, is_key=True)}{self.colon}{self.write(members[key])}" for key in members)
                return f"{{{self.comma.join(pairs)}}}"
            case _:
                return json.dumps(value)


_PYTHON = _Notation("=", ": ", ", ", {True: "True", False: "False", None: "None"})
_JSON_WORDS: Mapping[object, str] = {True: "true", False: "false", None: "null"}


class Literals:
    """Writes the rules of one tool's arguments.

    Args:
        grammar: the grammar that the rules are added to.
        calls: the dialect's calls, of style PYTHONIC or GEMMA.
        prefix: the prefix of the rules' names.
        tool: the tool. Keywords that cannot be enforced are refused if it is strict, and ignored otherwise.
        schema: the schema of the tool's arguments.
    """

    def __init__(self, grammar: Grammar, calls: Calls, prefix: str, tool: ToolSchema, schema: Schema) -> None:
        self._grammar = grammar
        self._prefix = prefix
        self._tool = tool
        self._schema = schema
        self._is_gemma = calls.style is Style.GEMMA
        self._notation = _Notation(":", ":", ",", _JSON_WORDS, calls.quote) if self._is_gemma else _PYTHON
        # Names of rules by their expression, or by the `$ref` that they were made for.
        self._rules: dict[str, str] = {}

    def arguments(self) -> str:
        """Returns the expression for all arguments, without brackets.

        Raises BlockyardError UNSUPPORTED_PARAMETER for a strict tool whose schema cannot be enforced;
        GRAMMAR_TOO_COMPLEX if the schema's references lead too deep.
        """
        self._refuse(self._schema.keys() & _KEYWORDS - _FOLLOWED["object"])
        try:
            return self._members(self._schema, self._notation.equals)
        except RecursionError:
            description = f"tool {self._tool.name!r} is too complex: the references lead too deep"
            raise invalid([Violation("conversation.tools", description, Reason.GRAMMAR_TOO_COMPLEX)]) from None

    def _add(self, expression: str) -> str:
        """Returns the name of the rule with an expression, and adds the rule if there is none."""
        if expression not in self._rules:
            self._rules[expression] = self._grammar.add(self._new_name(), expression)
        return self._rules[expression]

    def _new_name(self) -> str:
        return f"{self._prefix}_{len(self._rules)}"

    def _refuse(self, keywords: Iterable[str]) -> None:
        if self._tool.strict and (found := sorted(keywords)):
            form = "Gemma's" if self._is_gemma else "Python's"
            description = (
                f"the keyword {found[0]} of tool {self._tool.name!r} cannot be enforced in calls of {form} form"
            )
            raise invalid([Violation("conversation.tools", description, Reason.UNSUPPORTED_PARAMETER)])

    def _value(self, part: Any) -> str:
        if not isinstance(part, dict):
            self._refuse(() if part is True else ("false",))
            return self._any()
        schema = cast("dict[str, Any]", part)
        others = schema.keys() & _KEYWORDS
        if isinstance(reference := schema.get("$ref"), str):
            self._refuse(others - {"$ref"})
            return self._reference(reference)
        for name in ("anyOf", "oneOf", "allOf"):
            branches = schema.get(name)
            if isinstance(branches, list) and branches and (name != "allOf" or len(branches) == 1):
                self._refuse(others - {name})
                return self._one_of(map(self._value, cast("list[object]", branches)))
        types = self._types(schema)
        if isinstance(values := [schema["const"]] if "const" in schema else schema.get("enum"), list):
            self._refuse(others - {"const", "enum"})
            return self._choices(cast("list[object]", values), types)
        self._refuse(others - frozenset[str]().union(*map(self._followed, types)))
        return self._one_of(self._of_type(each, schema) for each in types) if types else self._any()

    def _types(self, schema: Schema) -> Sequence[str]:
        """Returns the types that a schema allows; empty if the schema names none."""
        told = schema.get("type") or next((_IMPLIED[each] for each in _IMPLIED if each in schema), [])
        types = cast("list[object]", told) if isinstance(told, list) else [told]
        return [each for each in types if isinstance(each, str) and each in _TYPES]

    def _followed(self, kind: str) -> frozenset[str]:
        if kind == "string":
            return _LENGTHS if self._is_gemma else _LENGTHS | {"pattern", "format"}
        return _FOLLOWED.get(kind, frozenset())

    def _one_of(self, expressions: Iterable[str]) -> str:
        return self._add(" | ".join(dict.fromkeys(expressions)))

    def _reference(self, reference: str) -> str:
        if reference not in self._rules:
            # Register the name before writing the rule: the schema may refer to itself.
            name = self._rules[reference] = self._new_name()
            self._grammar.add(name, self._value(self._schema if reference == "#" else resolve(reference, self._schema)))
        return self._rules[reference]

    def _choices(self, values: Sequence[object], types: Sequence[str]) -> str:
        kinds = {*types, "integer"} if "number" in types else types
        fitting = [value for value in values if not kinds or type_of(value) in kinds]
        if not fitting:
            self._refuse(("enum",))
            return self._any()
        return self._one_of(self._grammar.literal(self._notation.write(value)) for value in fitting)

    def _any(self) -> str:
        if "any" not in self._rules:
            name = self._rules["any"] = self._new_name()
            self._grammar.add(name, " | ".join([self._of_type(kind, {}) for kind in _TYPES if kind != "integer"]))
        return self._rules["any"]

    def _of_type(self, kind: str, schema: Schema) -> str:
        words = self._notation.words
        match kind:
            case "string":
                return self._text(schema)
            case "boolean":
                return self._add(f'"{words[True]}" | "{words[False]}"')
            case "null":
                return f'"{words[None]}"'
            case "array":
                return self._add(self._array(schema))
            case "object":
                return self._add(f'"{{" {self._members(schema, self._notation.colon)} "}}"')
            case _:
                return self._leaf(kind, schema)

    def _leaf(self, kind: str, schema: Schema) -> str:
        """Returns the expression for a value that is written as in JSON."""
        kept = {name: schema[name] for name in schema if name in self._followed(kind)}
        return self._add(json_expression(json.dumps({"type": kind, **kept})))

    def _text(self, schema: Schema) -> str:
        if not self._notation.quote:
            return self._leaf("string", schema)
        least, most = int(schema.get("minLength") or 0), schema.get("maxLength")
        key = f"text {least} {most}"
        if key not in self._rules:
            name = self._rules[key] = self._new_name()
            self._grammar.until(name, self._notation.quote, (least, None if most is None else int(most)))
        return f"{self._grammar.literal(self._notation.quote)} {self._rules[key]}"

    def _array(self, schema: Schema) -> str:
        least, most = int(schema.get("minItems") or 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        item = self._value(schema.get("items", True))
        times = f"{{{max(least - 1, 0)},{'' if most is None else int(most) - 1}}}"
        items = f'{item} ("{self._notation.comma}" {item}){times}'
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _members(self, schema: Schema, equals: str) -> str:
        """Returns the expression for keys and values, in the schema's order; for Gemma sorted, as its templates do."""
        required = [name for name in schema.get("required") or [] if isinstance(name, str)]
        properties: dict[str, Any] = schema.get("properties") or {}
        properties = {**properties, **{name: True for name in required if name not in properties}}
        if not properties:
            return self._free_members(schema.get("additionalProperties", "properties" not in schema), equals)
        keys = sorted(properties, key=str.lower) if self._is_gemma else [*properties]
        # Build the rules from the last key to the first: `behind` after another key, `first` as the first.
        behind, first = "", ""
        for key in reversed(keys):
            pair = f"{self._key(key, equals)} {self._value(properties[key])}"
            first = self._add(f"{pair} {behind}" if key in required else f"{pair} {behind} | {first or _NOTHING}")
            next_one = f'"{self._notation.comma}" {pair}'
            behind = self._add(f"{next_one if key in required else f'({next_one})?'} {behind}")
        return first

    def _key(self, key: str, equals: str) -> str:
        is_word = equals == "=" and _WORD.fullmatch(key)
        return self._grammar.literal(f"{key if is_word else self._notation.write(key, is_key=True)}{equals}")

    def _free_members(self, allowed: Any, equals: str) -> str:
        """Returns the expression for any number of keys with any names."""
        if allowed is False:
            return _NOTHING
        key = self._leaf("string", {}) if equals == _PYTHON.colon else "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
        pair = f'{key} "{equals}" {self._value(allowed)}'
        return self._add(f'({pair} ("{self._notation.comma}" {pair})*)?')
