"""An inference request and its response as values. Knows neither their encoding nor the meaning of the tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Parameter = bool | int | float | str | None


class RequestedOutput(NamedTuple):
    """A tensor that the client requests for the answer."""

    name: str
    has_parameters: bool


class Output(NamedTuple):
    """A tensor of one dimension."""

    name: str
    datatype: str
    elements: Sequence[Any]


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A decoded request.

    Attributes:
        name: the client's id for the request, or empty.
        inputs: the elements of each input, in row-major order.
        outputs: the first requested outputs.
        num_outputs: the number of all requested outputs.
        is_raw: whether tensors are sent as bytes, in the request and in the answer.
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
    """A complete answer or a piece of it. `errors`: the errors of failed choices, by the choice's number."""

    name: str
    model_name: str
    model_version: str
    is_final: bool
    errors: Mapping[int, str]
    outputs: Sequence[Output]
    is_raw: bool
