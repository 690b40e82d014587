"""What a program with tritonclient does, run in an environment of its own:

    python triton_client.py GRPC_ADDRESS HTTP_ADDRESS PROMPT

Imports nothing of ours. Writes what it was told as a JSON object.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
from tritonclient.utils import InferenceServerException

MODEL = "demo"
SAMPLING = {"temperature": "0", "max_tokens": "24"}


def inputs_of(*prompts: str, stream: bool = False, form: Any = tritonclient.grpc, **flags: bool) -> list[Any]:
    """Tensors as the client of Triton's vLLM backend makes them. `form`: the client's module."""
    tensors = {
        "text_input": np.array([prompt.encode() for prompt in prompts], dtype=np.object_),
        "sampling_parameters": np.array([json.dumps(SAMPLING).encode()], dtype=np.object_),
        **{name: np.array([value], dtype=bool) for name, value in {"stream": stream, **flags}.items()},
    }
    inputs = []
    for name, array in tensors.items():
        datatype = "BOOL" if array.dtype == bool else "BYTES"
        inputs.append(form.InferInput(name, list(array.shape), datatype))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def texts_of(result: Any) -> list[str]:
    return [text.decode() for text in result.as_numpy("text_output")]


def ask_server(client: Any) -> dict[str, Any]:
    metadata = client.get_model_metadata(MODEL, as_json=True)
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": client.is_model_ready(MODEL),
        "other_ready": client.is_model_ready("other"),
        "server": client.get_server_metadata(as_json=True)["name"],
        "outputs": [tensor["name"] for tensor in metadata["outputs"]],
    }


def infer(client: Any, *prompts: str) -> dict[str, Any]:
    flags = {"return_finish_reason": True, "return_num_output_tokens": True}
    inputs = inputs_of(*prompts, exclude_input_in_output=True, **flags)
    result = client.infer(MODEL, inputs, request_id="whole")
    return {
        "id": result.get_response().id,
        "texts": texts_of(result),
        "finish_reasons": [reason.decode() for reason in result.as_numpy("finish_reason")],
        "num_output_tokens": result.as_numpy("num_output_tokens").tolist(),
    }


def infer_over_http(address: str, *prompts: str) -> dict[str, Any]:
    """Asks twice: with binary tensors, which are the client's default, and for one of two outputs as JSON."""
    with tritonclient.http.InferenceServerClient(address) as client:
        inputs = inputs_of(*prompts, form=tritonclient.http, exclude_input_in_output=True)
        outputs = [
            tritonclient.http.InferRequestedOutput("text_output", binary_data=False),
            tritonclient.http.InferRequestedOutput("num_output_tokens"),
        ]
        binary, mixed = client.infer(MODEL, inputs), client.infer(MODEL, inputs, outputs=outputs, request_id="mixed")
        try:
            client.infer(MODEL, inputs, parameters={"top_p": 2.5})
        except InferenceServerException as error:
            refusal = {"status": error.status(), "message": error.message()}
        return {
            "live": client.is_server_live(),
            "ready": client.is_server_ready(),
            "model_ready": client.is_model_ready(MODEL),
            "other_ready": client.is_model_ready("other"),
            "server": client.get_server_metadata()["name"],
            "outputs": [tensor["name"] for tensor in client.get_model_metadata(MODEL)["outputs"]],
            "texts": [text.decode() for text in binary.as_numpy("text_output")],
            "mixed": [text if isinstance(text, str) else text.decode() for text in mixed.as_numpy("text_output")],
            "num_output_tokens": mixed.as_numpy("num_output_tokens").tolist(),
            "id": mixed.get_response()["id"],
            "refusal": refusal,
        }


def stream(client: Any, prompt: str) -> dict[str, Any]:
    """Several requests on one stream, of which one is wrong."""
    told: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: told.put((result, error)))
    outputs = [tritonclient.grpc.InferRequestedOutput("text_output")]
    for name in ("first", "second"):
        client.async_stream_infer(
            MODEL, inputs_of(prompt, stream=True), request_id=name, outputs=outputs, enable_empty_final_response=True
        )
    client.async_stream_infer(MODEL, inputs_of(prompt, "another", stream=True), request_id="wrong")
    pieces: dict[str, list[str]] = {"first": [], "second": []}
    errors: list[str] = []
    num_unfinished = 3
    while num_unfinished:
        result, error = told.get(timeout=60)
        if error is not None:
            errors.append(str(error))
            num_unfinished -= 1
            continue
        response = result.get_response()
        pieces[response.id].extend(texts_of(result))
        num_unfinished -= response.parameters["triton_final_response"].bool_param
    client.stop_stream()
    return {"pieces": pieces, "errors": errors}


def refusal(client: Any, prompt: str) -> dict[str, Any]:
    try:
        client.infer(MODEL, inputs_of(prompt), parameters={"top_p": 2.5})
    except InferenceServerException as error:
        return {"status": error.status(), "message": error.message()}
    raise AssertionError("it was taken")


async def stream_with_asyncio(target: str, prompt: str) -> list[str]:
    async def requests() -> Any:
        yield {
            "model_name": MODEL,
            "inputs": inputs_of(prompt, stream=True),
            "request_id": "aio",
            "parameters": SAMPLING,
        }

    async with tritonclient.grpc.aio.InferenceServerClient(target) as client:
        pieces = []
        async for result, error in client.stream_infer(requests(), stream_timeout=60):
            assert error is None, error
            pieces.extend(texts_of(result))
        return pieces


def wire() -> dict[str, Any]:
    """Number and type of each field of each message, and the types of each call."""
    described = tritonclient.grpc.service_pb2.DESCRIPTOR
    (service,) = described.services_by_name.values()
    messages = list(described.message_types_by_name.values())
    messages += [nested for message in messages for nested in message.nested_types]
    return {
        "messages": {m.full_name: {f.name: [f.number, f.type] for f in m.fields} for m in messages},
        "calls": {m.name: [m.input_type.full_name, m.output_type.full_name] for m in service.methods},
    }


def main(target: str, http_address: str, prompt: str) -> None:
    with tritonclient.grpc.InferenceServerClient(target) as client:
        told = {
            "version": importlib.metadata.version("tritonclient"),
            "wire": wire(),
            "server": ask_server(client),
            "whole": infer(client, prompt, "x = 1\n"),
            "stream": stream(client, prompt),
            "refusal": refusal(client, prompt),
        }
    told["http"] = infer_over_http(http_address, prompt, "x = 1\n")
    told["aio"] = asyncio.run(stream_with_asyncio(target, prompt))
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
