"""JSON Schemas of every keyword that is served, bounded, so that what a random model writes ends by itself."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

WORD: Schema = {"type": "string", "minLength": 1, "maxLength": 6}
DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
FLAG: Schema = {"type": "boolean"}


def record(properties: Schema, *optional: str, **more: Any) -> Schema:
    """An object of these properties and no others."""
    required = [name for name in properties if name not in optional]
    base = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return base | more


def items(item: Schema, least: int, most: int, **more: Any) -> Schema:
    """An array."""
    return {"type": "array", "items": item, "minItems": least, "maxItems": most, **more}


_ANY = [
    {"type": "null"},
    FLAG,
    {"type": ["boolean", "null"]},
    {"enum": ["red", "green", 3, None, True]},
    {"enum": [[1, 2], {"a": "b"}]},
    {"const": {"a": [1, "x"]}},
    {"const": 'über € 😀 "quoted" \\ \n'},
    {"anyOf": [WORD, DIGIT, {"type": "null"}]},
    {"anyOf": [{"const": "a"}, {"type": "array", "items": FLAG, "maxItems": 2}]},
    {"oneOf": [{"type": "null"}, DIGIT]},
    {"oneOf": [record({"kind": {"const": "a"}, "n": DIGIT}), record({"kind": {"const": "b"}, "s": WORD})]},
    {"allOf": [{"type": "string"}, {"minLength": 2}, {"maxLength": 5}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    {"$ref": "#/$defs/word", "$defs": {"word": WORD}},
    {"$ref": "#/definitions/digit", "definitions": {"digit": DIGIT}},
    {"title": "t", "description": "d", "default": 1, "examples": [2], "deprecated": True, **DIGIT},
]
_NUMBERS = [
    DIGIT,
    {"type": "integer", "minimum": -120, "maximum": -7},
    {"type": "integer", "minimum": -15, "maximum": 1030},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5},
    {"type": "integer", "minimum": 0, "maximum": 500, "multipleOf": 7},
    {"type": "number", "minimum": 0.5, "maximum": 0.75},
    {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 2.25},
    {"type": "number", "minimum": 0, "maximum": 3, "multipleOf": 0.25},
    {"type": ["integer", "null"], "minimum": 10, "maximum": 11},
    {"type": "integer", "enum": [4, 44, 444]},
]
_STRINGS = [
    WORD,
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "string", "maxLength": 0},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"type": "string", "pattern": "^(foo|ba[rz])-[0-9]{1,3}$"},
    {"type": "string", "pattern": "^\\d{3}/\\w{2}$"},
    {"type": "string", "pattern": '^[^"\\\\a-y]{1,5}$'},
    {"type": "string", "pattern": "^[ä-ü€]{1,3}$"},
    {"type": "string", "pattern": "^a", "maxLength": 4},
    {"type": "string", "enum": ["a", "ab", "abc", ""]},
    *({"type": "string", "format": name} for name in ("date-time", "date", "time", "ipv4", "ipv6", "uuid", "duration")),
    {"type": "string", "format": "email", "maxLength": 24},
    {"type": "string", "format": "hostname", "maxLength": 16},
    {"type": "string", "format": "uri", "maxLength": 24},
]
_ARRAYS = [
    items(DIGIT, 0, 3),
    items(WORD, 2, 2),
    items(FLAG, 1, 4),
    items({"type": "null"}, 0, 0),
    items(items(DIGIT, 1, 2), 1, 2),
    items(record({"a": DIGIT}), 0, 2),
    {"type": "array", "prefixItems": [DIGIT, WORD], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [FLAG], "items": DIGIT, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [WORD, WORD, WORD], "minItems": 1, "maxItems": 2},
    {"type": ["array", "null"], "items": {"enum": ["x", "y"]}, "maxItems": 3},
    items({"anyOf": [DIGIT, WORD, FLAG]}, 3, 3),
    {"$defs": {"row": items(DIGIT, 2, 2)}, **items({"$ref": "#/$defs/row"}, 1, 2)},
]
_OBJECTS = [
    record({"name": WORD, "age": DIGIT}),
    record({"name": WORD, "age": DIGIT, "tags": items(WORD, 0, 2)}, "age", "tags"),
    record({"a": record({"b": record({"c": FLAG})})}),
    record({"b": DIGIT, "a": DIGIT, 'ö/"~': FLAG}),
    record({}),
    {"type": "object", "additionalProperties": DIGIT, "maxProperties": 2},
    {"type": "object", "additionalProperties": FLAG, "minProperties": 1, "maxProperties": 3},
    {"type": "object", "patternProperties": {"^x_[a-c]$": DIGIT}, "additionalProperties": False, "maxProperties": 3},
    {"type": "object", "patternProperties": {"^[ab]{1,2}$": WORD}, "additionalProperties": False, "minProperties": 1}
    | {"maxProperties": 2},
    {"type": "object", "properties": {"a": DIGIT}, "required": ["a"], "maxProperties": 1},
    {"type": "object", "properties": {"a": DIGIT}, "required": ["a"], "additionalProperties": WORD, "maxProperties": 2},
    {"type": ["object", "null"], "properties": {"a": FLAG}, "additionalProperties": False},
    {"properties": {"a": DIGIT}, "type": "object", "required": ["a", "zz"], "additionalProperties": FLAG}
    | {"maxProperties": 2},
    record({"kind": {"const": "circle"}, "r": {"type": "number", "minimum": 0, "maximum": 9.5}}),
    record({"when": {"type": "string", "format": "date"}, "who": {"$ref": "#/$defs/who"}}, **{"$defs": {"who": WORD}}),
    {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": record(
                {"v": DIGIT, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            )
        },
    },
    {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": record({"v": DIGIT, "kids": items({"$ref": "#/$defs/tree"}, 0, 1)})},
    },
    record({"matrix": items(items(DIGIT, 2, 2), 2, 2)}),
    record({"x": {"anyOf": [WORD, items(WORD, 0, 2), {"type": "null"}]}}, "x"),
    record({"status": {"enum": ["ok", "error"]}, "code": {"type": "integer", "minimum": 100, "maximum": 599}}),
]
_TOOLS = [
    record({"city": WORD, "unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 14}}),
    record({"query": WORD, "limit": DIGIT, "filters": record({"from": {"type": "string", "format": "date"}}, "from")})
    | {"title": "search"},
    record({"path": {"type": "string", "pattern": "^/[a-z]{1,5}$"}, "lines": items(DIGIT, 2, 2)}),
    record({"steps": items(record({"do": {"enum": ["left", "right"]}, "times": DIGIT}), 1, 3)}),
    record({"amount": {"type": "number", "minimum": 0, "maximum": 99.5}, "currency": {"pattern": "^[A-Z]{3}$"} | WORD}),
    record({"a": {"allOf": [{"$ref": "#/$defs/d"}, {"minimum": 5}]}}, **{"$defs": {"d": DIGIT}}),
]
SCHEMAS: list[Schema] = [*_ANY, *_NUMBERS, *_STRINGS, *_ARRAYS, *_OBJECTS, *_TOOLS]
