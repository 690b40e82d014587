"""An inference request and its response as values. Knows neither their encoding nor the meaning of the tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Parameter = bool | int | float | str | None


class RequestedOutput(NamedTuple):
    """A tensor that the answer is to have."""

    name: str
    has_parameters: bool


class Output(NamedTuple):
    """A tensor of one dimension."""

    name: str
    datatype: str
    elements: Sequence[Any]


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request as it came.

    Attributes:
        name: the client's name of it, or empty.
        inputs: elements of each input, row-major.
        outputs: the first of those that are named; `num_outputs`: how many are.
        is_raw: its tensors came as bytes, and so does its answer.
    """

    name: str
    model_name: str
    model_version: str
    inputs: Mapping[str, list[Any]]
    parameters: Mapping[str, Parameter]
    outputs: Sequence[RequestedOutput]
    num_outputs: int
    is_raw: bool


@dataclass(frozen=True, slots=True)
class InferResponse:
    """A whole answer, or a part of one. `errors`: of the choices that failed, by number."""

    name: str
    model_name: str
    model_version: str
    is_final: bool
    errors: Mapping[int, str]
    outputs: Sequence[Output]
    is_raw: bool
