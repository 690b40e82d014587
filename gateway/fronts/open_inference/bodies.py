"""The bodies of the protocol's HTTP calls: decoded to requests, and encoded from responses.

Elements are JSON values, or bytes behind the JSON: the extension for binary data, in which the header
Inference-Header-Content-Length has the length of the JSON.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from blockyard.errors import Violation, invalid
from gateway.fronts.http_calls.bodies import BODY
from gateway.fronts.http_calls.body_types import Shape, at_most
from gateway.fronts.http_calls.streaming import encode_json
from gateway.fronts.open_inference.tensors import (
    MAX_DIMENSIONS,
    MAX_PARAMETERS,
    InferRequest,
    InferResponse,
    InputTensor,
    Output,
    RequestedOutput,
    check_number,
    pack,
    read_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HEADER_LENGTH = "inference-header-content-length"
# The parameters of the extension: of an input, of an output of a request, of a request, and of an output of an answer.
_SIZE, _BINARY, _ALL_BINARY = "binary_data_size", "binary_data", "binary_data_output"

Parameters = Annotated[dict[str, Any], at_most(MAX_PARAMETERS)]


class InferInput(Shape):
    """A tensor: its elements are in `data`, in any nesting, or behind the JSON."""

    name: str
    datatype: str
    shape: Annotated[list[int], at_most(MAX_DIMENSIONS)]
    data: list[Any] | None = None
    parameters: Parameters | None = None


class InferOutput(Shape):
    """A tensor that the client requests for the answer."""

    name: str
    parameters: Parameters | None = None


class InferBody(Shape):
    """The body of /v2/models/{name}/infer."""

    id: str | None = None
    parameters: Parameters | None = None
    inputs: Annotated[list[InferInput], Field(fail_fast=True)]
    outputs: Annotated[list[InferOutput], Field(fail_fast=True)] | None = None


def _check_texts(value: Any) -> Any:
    # Not a union: pydantic would report a violation for each of its branches.
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return value
    raise PydanticCustomError("texts", "should be a string or a list of strings")


Texts = Annotated[list[str], BeforeValidator(_check_texts, json_schema_input_type=str | list[str])]


class GenerateBody(Shape):
    """The body of /v2/models/{name}/generate and generate_stream.

    Inputs of one element and parameters may be fields of the body, or entries of `parameters`.
    """

    model_config = ConfigDict(extra="allow")

    id: str | None = None
    text_input: Texts
    parameters: Parameters | None = None


def split_body(raw: bytes, length: str | None) -> tuple[bytes, bytes]:
    """Splits a body into its JSON and the bytes behind it.

    `length`: the header Inference-Header-Content-Length. Raises BlockyardError FIELD_INVALID if it has no length.
    """
    if length is None:
        return raw, b""
    if not (length.isascii() and length.isdecimal() and len(length) < 20 and int(length) <= len(raw)):
        raise invalid([Violation(HEADER_LENGTH, f"must be a number of bytes, at most the body's {len(raw)}")])
    return raw[: int(length)], raw[int(length) :]


def decode_infer(
    body: InferBody, binary: bytes, datatypes: Mapping[str, str], *, max_elements: int, model_name: str, version: str
) -> InferRequest:
    """Decodes a request; raises BlockyardError FIELD_INVALID with all violations of its tensors.

    Args:
        body: the request's JSON.
        binary: the bytes behind the JSON.
        datatypes: the datatypes of the allowed tensors, by name.
        max_elements: the most elements of one tensor.
        model_name, version: the model's name and version in the request's path.
    """
    check_number(body.inputs, datatypes)
    rest = _Binary(binary)
    tensors = [_tensor(each, rest, max_elements) for each in body.inputs]
    inputs = read_tensors(tensors, datatypes, max_elements)
    if rest.num_bytes:
        raise invalid([Violation(BODY, f"has {rest.num_bytes} bytes more than its tensors")])
    outputs = body.outputs or []
    return InferRequest(
        name=body.id or "",
        model_name=model_name,
        model_version=version,
        inputs=inputs,
        parameters=_without(body.parameters, _ALL_BINARY),
        outputs=[RequestedOutput(each.name, bool(_without(each.parameters, _BINARY))) for each in outputs],
        num_outputs=len(outputs),
    )


class _Binary:
    """The bytes behind a request's JSON, which its tensors take in their order."""

    def __init__(self, binary: bytes) -> None:
        self._binary = binary
        self._start = 0

    @property
    def num_bytes(self) -> int:
        """The number of bytes that no tensor has taken."""
        return len(self._binary) - self._start

    def take(self, size: Any) -> bytes | None:
        """Returns the next bytes; None if `size` is not a number of bytes that are there."""
        if type(size) is not int or not 0 <= size <= self.num_bytes:
            return None
        self._start += size
        return self._binary[self._start - size : self._start]


def _tensor(each: InferInput, rest: _Binary, max_elements: int) -> InputTensor:
    contents: bytes | list[Any] = []
    fault: Violation | None = None
    if each.parameters and _SIZE in each.parameters:
        taken = rest.take(each.parameters[_SIZE])
        contents = taken or b""
        if taken is None:
            fault = Violation(each.name, f"has a {_SIZE} that is no number of bytes which are left in the body")
        elif each.data is not None:
            fault = Violation(each.name, f"must not have data beside {_SIZE}")
    elif each.data is None:
        fault = Violation(each.name, f"must have data, or the parameter {_SIZE}")
    else:
        contents = [_element(item) for item in islice(_flatten(each.data), max_elements + 1)]
        if any(item is None or isinstance(item, bool) != (each.datatype == "BOOL") for item in contents):
            fault = Violation(each.name, "must have texts as data if its type is BYTES, and true or false if BOOL")
    has_parameters = bool(_without(each.parameters, _SIZE))
    return InputTensor(each.name, each.datatype, each.shape, contents, has_parameters, fault)


def _flatten(data: list[Any], depth: int = MAX_DIMENSIONS) -> Iterator[Any]:
    for item in data:
        if isinstance(item, list) and depth:
            yield from _flatten(item, depth - 1)
        else:
            yield item


def _element(item: Any) -> bytes | bool | None:
    """Returns the element of a tensor for a JSON value; None for a value that no tensor has."""
    if isinstance(item, str):
        return item.encode()
    return item if isinstance(item, bool) else None


def _without(parameters: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    return {each: value for each, value in (parameters or {}).items() if each != name}


def encode_infer(response: InferResponse, body: InferBody) -> tuple[bytes, int | None]:
    """Encodes a response, and returns with it the length of its JSON if bytes follow; else None."""
    is_all_binary = (body.parameters or {}).get(_ALL_BINARY) is True
    binary = {each.name: (each.parameters or {}).get(_BINARY, is_all_binary) is True for each in body.outputs or ()}
    pieces: list[bytes] = []
    outputs: list[dict[str, Any]] = []
    for output in response.outputs:
        tensor: dict[str, Any] = {
            "name": output.name,
            "datatype": output.datatype,
            "shape": [len(output.elements)],
        }
        if binary.get(output.name, is_all_binary):
            pieces.append(pack(output))
            tensor["parameters"] = {_SIZE: len(pieces[-1])}
        else:
            tensor["data"] = _values(output)
        outputs.append(tensor)
    content = encode_json(_head(response) | {"outputs": outputs}).encode()
    return b"".join((content, *pieces)), len(content) if pieces else None


def decode_generate(body: GenerateBody, *, stream: bool, model_name: str, version: str) -> InferRequest:
    """Decodes a request of Triton's extension for generation. `stream`: whether its answer is streamed by default."""
    parameters: dict[str, Any] = {"stream": stream, **(body.parameters or {}), **(body.model_extra or {})}
    return InferRequest(
        name=body.id or "",
        model_name=model_name,
        model_version=version,
        inputs={"text_input": [text.encode() for text in body.text_input]},
        parameters=parameters,
    )


def encode_generate(response: InferResponse) -> str:
    """Encodes a response of the extension for generation: a tensor of one element becomes its value."""
    tensors = {output.name: _values(output) for output in response.outputs}
    single = {name: values[0] if len(values) == 1 else values for name, values in tensors.items()}
    return encode_json(_head(response) | single)


def _head(response: InferResponse) -> dict[str, Any]:
    head = {"id": response.name} if response.name else {}
    head |= {"model_name": response.model_name, "model_version": response.model_version}
    errors = response.error_parameters()
    return head | ({"parameters": errors} if errors else {})


def _values(output: Output) -> list[Any]:
    return [item.decode() if isinstance(item, bytes) else item for item in output.elements]
