"""The form of an answer as the agents' APIs ask for it, and its parameters' names in errors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from blockyard.contract.request import JsonSchema

if TYPE_CHECKING:
    from collections.abc import Mapping

_FORMAT, _SCHEMA = "format", "format.json_schema"


def schema_format(schema: Mapping[str, Any]) -> JsonSchema:
    return JsonSchema(json.dumps(schema, ensure_ascii=False))


def format_parameter(field: str, name: str) -> str | None:
    """Returns the parameter of a field of the core that is about the form; None for other fields.

    `name`: of the parameter that has `schema` in it.
    """
    if field == _FORMAT or field.startswith(_FORMAT + "."):
        return name + field.removeprefix(_SCHEMA).removeprefix(_FORMAT)
    return None
