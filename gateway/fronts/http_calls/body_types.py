"""Types of the bodies of HTTP calls: strict shapes, and parameters that are known but not served.

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
# The kind of the errors that become Reason.UNSUPPORTED_PARAMETER.
UNSUPPORTED = "unsupported"


def unsupported(description: str) -> PydanticCustomError:
    """Makes the error of a parameter that is known and not served."""
    return PydanticCustomError(UNSUPPORTED, "{description}", {"description": description})


class Neutral:
    """Marks a parameter that is not served yet: null and the values given here are accepted and change nothing.

    `message` describes what is wrong with other values.
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
    # A shape that is written again is a model already.
    return f"[{getattr(value, 'type', None)}]" if isinstance(value, BaseModel) else None


# Tags of a union's shapes: their types in brackets, which are left out of an error's path.
BY_TYPE = Discriminator(
    _read_type, custom_error_type="type", custom_error_message="should be an object with a type that is known"
)

NotServed = Annotated[Any, Neutral()]
"""A parameter of which only null is taken."""


def at_most(limit: int) -> BeforeValidator:
    """Limits the entries of a list or object before they are validated; the OpenAPI document has the limit too."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(cast("list[Any]", value)) > limit:
            raise PydanticCustomError("too_many", "has more than {limit} entries", {"limit": limit})
        return value

    return BeforeValidator(check)


# In JSON the key of an object is a string.
TokenIdKey = Annotated[int, Field(strict=False)]


class Shape(BaseModel):
    """A body, or a part of one: no other names, no other types."""

    # Whether its lists may have as many numbers or texts as a body holds.
    HAS_LONG_LISTS: ClassVar[bool] = False

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _bound(cls, value: Any) -> Any:
        """Keeps a few of the unknown parameters: each is an error, and there may be a million."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        known = {name: item for name, item in value.items() if name in cls.model_fields}
        unknown = itertools.islice((name for name in value if name not in known), MAX_UNKNOWN_PARAMETERS)
        return known | {name: value[name] for name in unknown}


def schema_format(schema: Mapping[str, Any]) -> JsonSchema:
    return JsonSchema(json.dumps(schema, ensure_ascii=False))
