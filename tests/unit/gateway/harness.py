"""The gateway's core and its gRPC front in this process, attached to a fake scheduler over real sockets."""

from __future__ import annotations

import asyncio
import functools
import secrets
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio

from blockyard.channels import PUBLIC_MESSAGE_BYTES
from blockyard.configuration import ModelSettings, PublicSettings
from blockyard.errors import BlockyardError, Reason
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from blockyard.service.servers import bind, make_server
from gateway.config import GatewayConfiguration, ServiceSettings
from gateway.fronts.grpc_api.servicer import SERVICE, InferenceServicer, add_inference_service
from gateway.generation import GenerationService
from gateway.live.live_requests import LiveRequests
from gateway.live.scheduler_link import SchedulerLink
from gateway.text.tokenizer_files import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gateway.text.tokenizer import Tokenizer
    from tests.kit.fakes.fake_scheduler import FakeScheduler

DEMO_MODEL = Path(__file__).parents[3] / "models" / "demo"
END_TOKEN, END_OF_TURN = 0, 3


@functools.cache
def demo_tokenizer() -> Tokenizer:
    """The demo model's tokenizer: byte-level, 4096 ids, end tokens 0 and 3."""
    return load_tokenizer(DEMO_MODEL)


def ids_of(text: str) -> list[int]:
    """The ids of a text, without special tokens."""
    return demo_tokenizer().encode(text, add_special_tokens=False)


def spec(prompt: str = "Once upon a time", *, max_tokens: int = 8, **fields: Any) -> inference_pb2.GenerationSpec:
    """A request; fields of `stop` and `sampling` are given as dictionaries."""
    stop = {"max_tokens": max_tokens, **fields.pop("stop", {})}
    return inference_pb2.GenerationSpec(text=prompt, stop=stop, **fields)


async def rest_of(call: Any) -> list[inference_pb2.GenerationEvent]:
    """Reads a stream to its end, from where it is."""
    events: list[inference_pb2.GenerationEvent] = []
    while (message := await call.read()) is not grpc.aio.EOF:
        events.append(message.event)
    return events


def configuration(scheduler: FakeScheduler, **service: Any) -> GatewayConfiguration:
    """A gateway's settings on free ports, for a scheduler that runs."""
    return GatewayConfiguration(
        model=ModelSettings(model=str(DEMO_MODEL)),
        public=PublicSettings(grpc_port=0, http_port=0, admin_port=0),
        service=ServiceSettings(scheduler_address=scheduler.address, gateway_health_port=0, **service),
    )


@dataclass
class Front:
    """One gateway, as a client sees it, and its insides."""

    stub: Any
    channel: grpc.aio.Channel
    service: GenerationService
    live: LiveRequests
    link: SchedulerLink
    scheduler: FakeScheduler
    address: str

    def stream(self, request: inference_pb2.GenerationSpec, **options: Any) -> Any:
        """Begins a stream; iterate over its messages."""
        return self.stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=request), **options)

    async def events(self, request: inference_pb2.GenerationSpec) -> list[inference_pb2.GenerationEvent]:
        """Reads a whole stream."""
        return [message.event async for message in self.stream(request)]

    def resume(self, request_id: str, places: dict[int, tuple[int, int]] | None = None, **fields: Any) -> Any:
        """Reads a request again, behind (tokens, bytes) by index, or `positions`. Iterate over the messages."""
        for index, (num_tokens, num_text_bytes) in (places or {}).items():
            position = inference_pb2.Position(index=index, num_tokens=num_tokens, num_text_bytes=num_text_bytes)
            fields.setdefault("positions", []).append(position)
        return self.stub.ResumeGenerate(inference_pb2.ResumeGenerateRequest(request_id=request_id, **fields))

    async def wait_until_unread(self) -> None:
        """Waits until nobody reads an answer."""
        async with asyncio.timeout(10):
            await self.service.wait_until_idle()

    async def generate(self, request: inference_pb2.GenerationSpec) -> inference_pb2.GenerateResponse:
        """Asks for the whole answer."""
        return await self.stub.Generate(inference_pb2.GenerateRequest(spec=request))


@asynccontextmanager
async def serving(
    scheduler: FakeScheduler,
    *,
    attached: bool = True,
    tokenizer: Tokenizer | None = None,
    max_requests: int = 0,
    **windows: float,
) -> AsyncIterator[Front]:
    """Runs a gateway on a scheduler; with `attached`, once it knows the model. `windows`: see LiveRequests."""
    tokenizer = tokenizer or demo_tokenizer()
    if not scheduler.facts.model_digest:
        scheduler.facts.model_digest = tokenizer.model_digest
    link = SchedulerLink(scheduler.address, gateway_id=secrets.token_hex(4), model_digest=tokenizer.model_digest)
    live = LiveRequests(link, **windows)
    service = GenerationService(max_requests=max_requests)
    service.add_model("demo", tokenizer, link, live)
    server = make_server(PUBLIC_MESSAGE_BYTES, [SERVICE.full_name])
    add_inference_service(server, InferenceServicer(service))
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    await server.start()
    link.start(live.on_progress, live.on_scheduler_lost)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        front = Front(stub, channel, service, live, link, scheduler, address)
        try:
            if attached:
                async with asyncio.timeout(10):
                    await link.wait_until(lambda: link.facts is not None)
            yield front
        finally:
            await server.stop(0)
            service.stop(BlockyardError(Reason.DRAINING, "the test is over"))
            await link.stop()
    assert live.num_running == 0, "a request outlived the test"
