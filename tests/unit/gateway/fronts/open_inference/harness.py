"""Requests as clients send them, and the protocol's service on a gateway's core in this process."""

from __future__ import annotations

import json
import struct
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc.aio

from blockyard.channels import PUBLIC_MESSAGE_BYTES
from blockyard.open_inference.v2 import open_inference_pb2 as messages
from blockyard.open_inference.v2 import open_inference_pb2_grpc
from blockyard.service.servers import bind, make_server
from gateway.fronts.open_inference.servicer import SERVICE, OpenInferenceServicer, add_open_inference_service
from tests.unit.gateway.harness import Front, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.kit.fakes.fake_scheduler import FakeScheduler

PROMPT = "Once upon a time"


def infer(
    *prompts: str | bytes,
    sampling: dict[str, Any] | None = None,
    raw: bool = False,
    parameters: dict[str, Any] | None = None,
    outputs: Sequence[str] = (),
    fields: dict[str, Any] | None = None,
    **flags: bool,
) -> messages.ModelInferRequest:
    """A request: `sampling` as the JSON tensor, `flags` as tensors, `parameters` as parameters."""
    request = messages.ModelInferRequest(**(fields or {}))
    add(request, "text_input", "BYTES", [p if isinstance(p, bytes) else p.encode() for p in prompts], raw=raw)
    if sampling is not None:
        add(request, "sampling_parameters", "BYTES", [json.dumps(sampling).encode()], raw=raw)
    for name, value in flags.items():
        add(request, name, "BOOL", [value], raw=raw)
    for name, value in (parameters or {}).items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    for name in outputs:
        request.outputs.add(name=name)
    return request


def add(request: messages.ModelInferRequest, name: str, datatype: str, elements: list[Any], *, raw: bool) -> None:
    """Adds a tensor of one dimension."""
    tensor = request.inputs.add(name=name, datatype=datatype, shape=[len(elements)])
    if not raw:
        field = "bytes_contents" if datatype == "BYTES" else "bool_contents"
        getattr(tensor.contents, field).extend(elements)
    elif datatype == "BYTES":
        request.raw_input_contents.append(b"".join(struct.pack("<I", len(e)) + e for e in elements))
    else:
        request.raw_input_contents.append(bytes(elements))


def tensors(response: messages.ModelInferResponse) -> dict[str, list[Any]]:
    """The elements of each output, whose shapes are checked."""
    told: dict[str, list[Any]] = {}
    for number, output in enumerate(response.outputs):
        if response.raw_output_contents:
            assert not output.HasField("contents")
            elements = unpacked(output.datatype, response.raw_output_contents[number])
        else:
            fields = {"BYTES": "bytes_contents", "UINT32": "uint_contents", "FP32": "fp32_contents"}
            elements = list(getattr(output.contents, fields[output.datatype]))
        assert list(output.shape) == [len(elements)]
        told[output.name] = elements
    return told


def unpacked(datatype: str, content: bytes) -> list[Any]:
    """Reads raw elements as tritonclient does."""
    if datatype != "BYTES":
        return [number for (number,) in struct.iter_unpack({"UINT32": "<I", "FP32": "<f"}[datatype], content)]
    elements: list[bytes] = []
    while content:
        (length,) = struct.unpack_from("<I", content)
        elements.append(content[4 : 4 + length])
        content = content[4 + length :]
    return elements


def is_final(response: messages.ModelInferResponse) -> bool:
    """Whether it is the last one of its request."""
    return response.parameters["triton_final_response"].bool_param


@dataclass
class InferenceFront:
    """The service, as a client sees it, and the gateway behind it."""

    stub: Any
    channel: grpc.aio.Channel
    gateway: Front

    @property
    def scheduler(self) -> FakeScheduler:
        """The fake scheduler."""
        return self.gateway.scheduler

    async def infer(self, *prompts: str | bytes, **asked: Any) -> dict[str, list[Any]]:
        """The tensors of an answer."""
        return tensors(await self.stub.ModelInfer(infer(*prompts, **asked)))


@asynccontextmanager
async def serving_inference(scheduler: FakeScheduler, **options: Any) -> AsyncIterator[InferenceFront]:
    """Runs a gateway on a scheduler, with the protocol's service at a port of its own."""
    async with serving(scheduler, **options) as gateway:
        server = make_server(PUBLIC_MESSAGE_BYTES, [SERVICE.full_name])
        add_open_inference_service(server, OpenInferenceServicer(gateway.service))
        port = bind(server, "127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                yield InferenceFront(stub, channel, gateway)
            finally:
                await server.stop(0)
