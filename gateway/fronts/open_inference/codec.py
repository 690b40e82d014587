"""Decodes and encodes the protocol's messages, whose tensors are raw or typed. Knows no tensor by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blockyard.errors import Violation, invalid
from blockyard.open_inference.v2 import open_inference_pb2
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
    from collections.abc import Mapping, Sequence


Request = open_inference_pb2.ModelInferRequest

Response = open_inference_pb2.ModelInferResponse

# The parameter that marks the last response.
_FINAL = "triton_final_response"

_TYPED_FIELDS = {
    "BYTES": "bytes_contents",
    "BOOL": "bool_contents",
    "UINT32": "uint_contents",
    "FP32": "fp32_contents",
}


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


def _decode_parameter(message: open_inference_pb2.InferParameter) -> Any:
    choice = message.WhichOneof("parameter_choice")
    return None if choice is None else getattr(message, choice)


def encode_response(response: InferResponse) -> Response:
    message = Response(model_name=response.model_name, model_version=response.model_version, id=response.name)
    message.parameters[_FINAL].bool_param = response.is_final
    for name, error in response.error_parameters().items():
        message.parameters[name].string_param = error
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
    check_number(inputs, datatypes)
    if raw and len(raw) != len(inputs):
        description = f"must have an entry for each of the {len(inputs)} inputs, or none at all; it has {len(raw)}"
        raise invalid([Violation("raw_input_contents", description)])
    tensors = [_tensor(each, raw[number] if raw else None, max_elements) for number, each in enumerate(inputs)]
    return read_tensors(tensors, datatypes, max_elements)


def _tensor(message: Request.InferInputTensor, raw: bytes | None, max_elements: int) -> InputTensor:
    fault: Violation | None = None
    if raw is not None and message.HasField("contents"):
        fault = Violation(message.name, "must not have contents beside raw_input_contents")
    contents: bytes | Sequence[Any] = () if raw is None else raw
    if raw is None and (field := _TYPED_FIELDS.get(message.datatype)):
        contents = getattr(message.contents, field)[: max_elements + 1]
    return InputTensor(
        message.name,
        message.datatype,
        message.shape[: MAX_DIMENSIONS + 1],
        contents,
        bool(message.parameters),
        fault,
    )


def write_outputs(response: Response, outputs: Sequence[Output], *, raw: bool) -> None:
    """Adds tensors to a response. `raw`: whether their elements are written as bytes."""
    for output in outputs:
        tensor = response.outputs.add(name=output.name, datatype=output.datatype, shape=[len(output.elements)])
        if raw:
            response.raw_output_contents.append(pack(output))
        else:
            getattr(tensor.contents, _TYPED_FIELDS[output.datatype]).extend(output.elements)
