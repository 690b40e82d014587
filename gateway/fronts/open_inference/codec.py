"""Decodes and encodes the protocol's messages: elements of BYTES, BOOL, UINT32 and FP32, raw or typed.

Knows no tensor by its name.

Raw elements are encoded as in tritonclient: numbers in little endian, booleans as one byte, and each element of BYTES
after its length in four bytes.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from blockyard.errors import Reason, Violation, invalid
from blockyard.open_inference.v2 import open_inference_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


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


Request = open_inference_pb2.ModelInferRequest

Response = open_inference_pb2.ModelInferResponse

MAX_PARAMETERS = 256

# The parameter that marks the last response.
_FINAL = "triton_final_response"

# The most dimensions of a tensor; no client needs more.
MAX_DIMENSIONS = 8

_LENGTH = struct.Struct("<I")

_FORMATS = {"BOOL": "?", "UINT32": "I", "FP32": "f"}

_TYPED_FIELDS = {
    "BYTES": "bytes_contents",
    "BOOL": "bool_contents",
    "UINT32": "uint_contents",
    "FP32": "fp32_contents",
}


class _Malformed(Exception):
    """Raised for a tensor that cannot be read."""


def decode_request(
    message: Request, datatypes: Mapping[str, str], *, max_elements: int, max_outputs: int
) -> InferRequest:
    """Decodes a request; raises BlockyardError FIELD_INVALID.

    Of the requested outputs, at most `max_outputs` + 1 are decoded, so that the caller notices an excess.

    Args:
        message: the request.
        datatypes: the datatypes of the allowed tensors, by name.
        max_elements: the most elements of one tensor.
        max_outputs: the most tensors of an answer.
    """
    if len(message.parameters) > MAX_PARAMETERS:
        raise invalid(
            [Violation("parameters", f"must have at most {MAX_PARAMETERS} entries, not {len(message.parameters)}")]
        )
    return InferRequest(
        name=message.id,
        model_name=message.model_name,
        model_version=message.model_version,
        inputs=read_inputs(message, datatypes, max_elements),
        parameters={name: _decode_parameter(parameter) for name, parameter in message.parameters.items()},
        outputs=[RequestedOutput(each.name, bool(each.parameters)) for each in message.outputs[: max_outputs + 1]],
        num_outputs=len(message.outputs),
        is_raw=bool(message.raw_input_contents),
    )


def _decode_parameter(message: open_inference_pb2.InferParameter) -> Parameter:
    choice = message.WhichOneof("parameter_choice")
    return None if choice is None else getattr(message, choice)


def encode_response(response: InferResponse) -> Response:
    message = Response(model_name=response.model_name, model_version=response.model_version, id=response.name)
    message.parameters[_FINAL].bool_param = response.is_final
    for number, error in response.errors.items():
        message.parameters[f"error_{number}"].string_param = error
    write_outputs(message, response.outputs, raw=response.is_raw)
    return message


def read_inputs(request: Request, datatypes: Mapping[str, str], max_elements: int) -> dict[str, list[Any]]:
    """Reads the elements of each input in row-major order; raises BlockyardError with all violations.

    Args:
        request: the request.
        datatypes: the datatypes of the allowed tensors, by name.
        max_elements: the most elements of one tensor.
    """
    inputs, raw = request.inputs, request.raw_input_contents
    if len(inputs) > len(datatypes):
        raise invalid([Violation("inputs", f"must have at most {len(datatypes)} tensors, not {len(inputs)}")])
    if raw and len(raw) != len(inputs):
        description = f"must have an entry for each of the {len(inputs)} inputs, or none at all; it has {len(raw)}"
        raise invalid([Violation("raw_input_contents", description)])
    violations: list[Violation] = []
    read: dict[str, list[Any]] = {}
    for number, tensor in enumerate(inputs):
        if found := list(_misfits(tensor, datatypes, is_raw=bool(raw), is_second=tensor.name in read)):
            violations.extend(found)
            continue
        try:
            read[tensor.name] = _elements(tensor, raw[number] if raw else None, max_elements)
        except _Malformed as error:
            violations.append(Violation(tensor.name, str(error)))
    if violations:
        raise invalid(violations)
    return read


def _misfits(
    tensor: Request.InferInputTensor, datatypes: Mapping[str, str], *, is_raw: bool, is_second: bool
) -> Iterator[Violation]:
    datatype = datatypes.get(tensor.name)
    if datatype is None:
        yield Violation(tensor.name or "inputs", "is not an input of this model")
    elif tensor.datatype != datatype:
        yield Violation(tensor.name, f"must be of type {datatype}, not {tensor.datatype!r}")
    if is_second:
        yield Violation(tensor.name, "is given twice")
    if tensor.parameters:
        description = "has parameters, which are not supported: send its elements in the request"
        yield Violation(tensor.name, description, Reason.UNSUPPORTED_PARAMETER)
    if is_raw and tensor.HasField("contents"):
        yield Violation(tensor.name, "must not have contents beside raw_input_contents")


def _elements(tensor: Request.InferInputTensor, raw: bytes | None, max_elements: int) -> list[Any]:
    shape = tensor.shape[: MAX_DIMENSIONS + 1]
    if len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0:
        raise _Malformed(f"must have at most {MAX_DIMENSIONS} dimensions, and none below 0")
    num_elements = math.prod(shape)
    if num_elements > max_elements:
        raise _Malformed(f"must have at most {max_elements} elements, not {num_elements}")
    if raw is None:
        elements = list(getattr(tensor.contents, _TYPED_FIELDS[tensor.datatype])[: num_elements + 1])
    elif tensor.datatype == "BYTES":
        elements = _split(raw, num_elements)
    else:
        elements = _unpack(raw, tensor.datatype, num_elements)
    if len(elements) != num_elements:
        raise _Malformed(f"has the shape {list(shape)}, and not as many elements")
    return elements


def _split(raw: bytes, num_elements: int) -> list[bytes]:
    elements: list[bytes] = []
    start = 0
    while start < len(raw) and len(elements) <= num_elements:
        begin = start + _LENGTH.size
        if begin > len(raw):
            raise _Malformed("has contents that end within the length of an element")
        (length,) = _LENGTH.unpack_from(raw, start)
        start = begin + length
        if start > len(raw):
            raise _Malformed("has contents that end within an element")
        elements.append(raw[begin:start])
    return elements


def _unpack(raw: bytes, datatype: str, num_elements: int) -> list[Any]:
    numbers = struct.Struct(f"<{num_elements}{_FORMATS[datatype]}")
    if numbers.size != len(raw):
        raise _Malformed(f"has {num_elements} elements by its shape, which are {numbers.size} bytes, not {len(raw)}")
    return list(numbers.unpack(raw))


def write_outputs(response: Response, outputs: Sequence[Output], *, raw: bool) -> None:
    """Adds tensors to a response. `raw`: whether their elements are written as bytes."""
    for output in outputs:
        tensor = response.outputs.add(name=output.name, datatype=output.datatype, shape=[len(output.elements)])
        if raw:
            response.raw_output_contents.append(_pack(output))
        else:
            getattr(tensor.contents, _TYPED_FIELDS[output.datatype]).extend(output.elements)


def _pack(output: Output) -> bytes:
    if output.datatype == "BYTES":
        return b"".join(part for element in output.elements for part in (_LENGTH.pack(len(element)), element))
    return struct.pack(f"<{len(output.elements)}{_FORMATS[output.datatype]}", *output.elements)
