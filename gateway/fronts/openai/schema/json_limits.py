"""Writes the core's rules for values as JSON Schema: ranges of numbers, lengths of texts and lists.

A schema cannot express limits that depend on the model or on two parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blockyard.contract.sampling import MAX_FLOAT32, Range
from gateway.fronts.openai import errors
from gateway.request import REQUEST_ID_PATTERN
from gateway.validation import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRING_CHARACTERS,
    MAX_STOP_STRINGS,
    RULES,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


_MAX_BIAS = 100


def tell_ranges(properties: dict[str, Any], names: Mapping[str, str]) -> None:
    """Adds the ranges of numbers to the schemas of a body's parameters.

    Args:
        properties: the schemas by the parameters' names; changed in place.
        names: the body's names for the core's fields, where they differ from the general names.
    """
    for rule in RULES:
        # best_of only has this range if it is the width of a beam search: leave it out.
        if rule.field == "beam_search.width":
            continue
        for form in properties.get(errors.parameter(rule.field, names), {}).get("anyOf", ()):
            if form.get("type") in ("integer", "number"):
                form |= _bounds(rule.range)


def _bounds(values: Range) -> dict[str, float]:
    bounds: dict[str, float] = {}
    if values.low > -MAX_FLOAT32:
        bounds["exclusiveMinimum" if values.low_is_open else "minimum"] = values.low
    if values.high < MAX_FLOAT32:
        bounds["maximum"] = values.high
    return bounds


def tell_lengths(properties: dict[str, Any]) -> None:
    """Adds the limits other than ranges to the parameters of a completion or a chat, in place."""
    # Over HTTP, -1 also turns top_k off.
    _form(properties["top_k"], "integer")["minimum"] = -1
    _form(properties["truncate_prompt_tokens"], "integer").update({"minimum": -1, "not": {"const": 0}})
    stop = {"minLength": 1, "maxLength": MAX_STOP_STRING_CHARACTERS}
    word = {"minLength": 1, "maxLength": MAX_BAD_WORD_CHARACTERS}
    bias: dict[str, Any] = {"minimum": -_MAX_BIAS, "maximum": _MAX_BIAS}
    _form(properties["request_id"], "string")["pattern"] = f"^{REQUEST_ID_PATTERN}$"
    _form(properties["stop"], "string").update(stop)
    _set_item_limits(properties["stop"], stop, MAX_STOP_STRINGS)
    _set_item_limits(properties["bad_words"], word, MAX_BAD_WORDS)
    _set_item_limits(properties["stop_token_ids"], {"minimum": 0})
    _set_item_limits(properties["allowed_token_ids"], {"minimum": 0})
    biases = _form(properties["logit_bias"], "object")
    biases["additionalProperties"].update(bias)
    biases |= {"maxProperties": MAX_LOGIT_BIASES, "propertyNames": {"pattern": "^[0-9]{1,10}$"}}


def _set_item_limits(schema: dict[str, Any], limits: dict[str, Any], max_items: int | None = None) -> None:
    array = _form(schema, "array")
    array["items"].update(limits)
    if max_items is not None:
        array["maxItems"] = max_items


def _form(schema: dict[str, Any], kind: str) -> dict[str, Any]:
    """Returns the alternative of a parameter's schema that has the type `kind`."""
    return next(form for form in schema["anyOf"] if form.get("type") == kind)
