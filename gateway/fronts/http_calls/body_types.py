"""Base types for the bodies of HTTP calls: strict objects, and parameters that are known but not supported.

Knows no parameter by name.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, model_validator
from pydantic_core import PydanticCustomError, core_schema

from blockyard.contract.request import JsonSchema

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler

MAX_UNKNOWN_PARAMETERS = 64
# pydantic's error type for errors that become Reason.UNSUPPORTED_PARAMETER.
UNSUPPORTED = "unsupported"


def unsupported(description: str) -> PydanticCustomError:
    """Makes the error for a parameter that is known but not supported."""
    return PydanticCustomError(UNSUPPORTED, "{description}", {"description": description})


class Neutral:
    """Marks a parameter that is not supported yet. Only null and the given `values` are accepted, without an effect.

    `message`: the error for other values.
    """

    def __init__(self, *values: Any, message: str = "is not supported yet") -> None:
        self._values = values
        self._message = message

    def _check(self, value: Any) -> None:
        if value is None or any(value == neutral and type(value) is type(neutral) for neutral in self._values):
            return
        raise unsupported(self._message)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {
            "enum": [None, *self._values],
            "description": f"{self._message[:1].upper()}{self._message[1:]}: leave it out.",
        }


def _read_type(value: Any) -> str | None:
    if isinstance(value, dict):
        return f"[{cast('dict[str, Any]', value).get('type')}]"
    # When pydantic serializes a body, the value is a model already.
    return f"[{getattr(value, 'type', None)}]" if isinstance(value, BaseModel) else None


# Chooses a union's type by the field `type`. The tags are in brackets, so that errors leave them out of paths.
BY_TYPE = Discriminator(
    _read_type, custom_error_type="type", custom_error_message="should be an object with a type that is known"
)

NotServed = Annotated[Any, Neutral()]
"""An unsupported parameter: only null is accepted."""


def at_most(limit: int) -> BeforeValidator:
    """Makes a validator that limits the entries of a list or object before they are validated."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(cast("list[Any]", value)) > limit:
            raise PydanticCustomError("too_many", "has more than {limit} entries", {"limit": limit})
        return value

    return BeforeValidator(check)


# A token id as a key of an object, which is a string in JSON.
TokenIdKey = Annotated[int, Field(strict=False)]


class Shape(BaseModel):
    """A body or a part of it. Refuses unknown names and converts no types."""

    # Whether the body may have long lists of numbers or texts, limited only by its size.
    HAS_LONG_LISTS: ClassVar[bool] = False

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _bound(cls, value: Any) -> Any:
        """Drops all but the first unknown parameters: each one makes an error, and there may be a million."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        known = {name: item for name, item in value.items() if name in cls.model_fields}
        unknown = itertools.islice((name for name in value if name not in known), MAX_UNKNOWN_PARAMETERS)
        return known | {name: value[name] for name in unknown}


def schema_format(schema: Mapping[str, Any]) -> JsonSchema:
    return JsonSchema(json.dumps(schema, ensure_ascii=False))
