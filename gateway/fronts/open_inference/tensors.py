"""The tensors of requests and answers, and their elements as bytes: BYTES, BOOL, UINT32 and FP32. Knows no message.

Raw elements are encoded as in tritonclient: numbers in little endian, booleans as one byte, and each element of BYTES
after its length in four bytes.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from blockyard.errors import Reason, Violation, invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class InputTensor(NamedTuple):
    """A tensor of a request, before its elements are checked.

    Attributes:
        shape: the sizes of the dimensions, at least the first MAX_DIMENSIONS + 1.
        contents: the elements as bytes, or their values, at least the first ones that are allowed and one more.
        has_parameters: whether the tensor has parameters that are not supported.
        fault: what is wrong with the tensor's form in the request; None: nothing.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    contents: bytes | Sequence[Any]
    has_parameters: bool
    fault: Violation | None = None


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
    inputs: Mapping[str, Sequence[Any]]
    parameters: Mapping[str, Any]
    outputs: Sequence[RequestedOutput] = ()
    num_outputs: int = 0
    is_raw: bool = False


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

    def error_parameters(self) -> dict[str, str]:
        """Returns the parameters of the response that have the errors of failed choices."""
        return {f"error_{number}": error for number, error in self.errors.items()}


MAX_PARAMETERS = 256
# The most dimensions of a tensor; no client needs more.
MAX_DIMENSIONS = 8
_LENGTH = struct.Struct("<I")
_FORMATS = {"BOOL": "?", "UINT32": "I", "FP32": "f"}


class _Malformed(Exception):
    """Raised for a tensor that cannot be read."""


def check_number(tensors: Sequence[Any], datatypes: Mapping[str, str]) -> None:
    """Raises BlockyardError FIELD_INVALID for more tensors than there are names."""
    if len(tensors) > len(datatypes):
        raise invalid([Violation("inputs", f"must have at most {len(datatypes)} tensors, not {len(tensors)}")])


def read_tensors(
    tensors: Sequence[InputTensor], datatypes: Mapping[str, str], max_elements: int
) -> dict[str, list[Any]]:
    """Reads the elements of each tensor in row-major order; raises BlockyardError with all violations.

    Args:
        tensors: the inputs of a request.
        datatypes: the datatypes of the allowed tensors, by name.
        max_elements: the most elements of one tensor.
    """
    violations: list[Violation] = []
    read: dict[str, list[Any]] = {}
    for tensor in tensors:
        if found := list(_misfits(tensor, datatypes, is_second=tensor.name in read)):
            violations.extend(found)
            continue
        try:
            read[tensor.name] = _elements(tensor, max_elements)
        except _Malformed as error:
            violations.append(Violation(tensor.name, str(error)))
    if violations:
        raise invalid(violations)
    return read


def _misfits(tensor: InputTensor, datatypes: Mapping[str, str], *, is_second: bool) -> Iterator[Violation]:
    datatype = datatypes.get(tensor.name)
    if datatype is None:
        yield Violation(tensor.name or "inputs", "is not an input of this model")
    elif tensor.datatype != datatype:
        yield Violation(tensor.name, f"must be of type {datatype}, not {tensor.datatype!r}")
    if is_second:
        yield Violation(tensor.name, "is given twice")
    if tensor.has_parameters:
        description = "has parameters, which are not supported: send its elements in the request"
        yield Violation(tensor.name, description, Reason.UNSUPPORTED_PARAMETER)
    if tensor.fault is not None:
        yield tensor.fault


def _elements(tensor: InputTensor, max_elements: int) -> list[Any]:
    shape = tensor.shape[: MAX_DIMENSIONS + 1]
    if len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0:
        raise _Malformed(f"must have at most {MAX_DIMENSIONS} dimensions, and none below 0")
    num_elements = math.prod(shape)
    if num_elements > max_elements:
        raise _Malformed(f"must have at most {max_elements} elements, not {num_elements}")
    if not isinstance(tensor.contents, bytes):
        elements = list(tensor.contents)
    elif tensor.datatype == "BYTES":
        elements = _split(tensor.contents, num_elements)
    else:
        elements = _unpack(tensor.contents, tensor.datatype, num_elements)
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


def pack(output: Output) -> bytes:
    """Writes the elements of a tensor as bytes."""
    if output.datatype == "BYTES":
        return b"".join(part for element in output.elements for part in (_LENGTH.pack(len(element)), element))
    return struct.pack(f"<{len(output.elements)}{_FORMATS[output.datatype]}", *output.elements)
