"""Public requests into the gateway's servicers; AttachResponse into its live requests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockyard.common.v1 import sampling_pb2
from blockyard.contract.codec.progress import decode_progress
from blockyard.contract.codec.scheduling import encode_submission
from blockyard.contract.sampling import FinishReason, SamplingParams
from blockyard.contract.scheduling import (
    Acceptance,
    Adapter,
    Add,
    Ending,
    Failure,
    ModelFacts,
    Progress,
    Resume,
    Submission,
    TokenUpdate,
)
from blockyard.errors import BlockyardError, Reason, to_status
from blockyard.inference.v1 import inference_pb2
from blockyard.open_inference.v2 import open_inference_pb2
from blockyard.scheduler.v1 import scheduler_pb2
from gateway.fronts.grpc_api.servicer import InferenceServicer
from gateway.fronts.open_inference.servicer import OpenInferenceServicer
from gateway.generation import GenerationService
from gateway.live.live_requests import LiveRequests
from gateway.live.scheduler_link import Cancelled
from gateway.request import GenerationRequest
from gateway.text.tokenizer_files import load_tokenizer
from tests.kit.fuzz.mutations import mutate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from google.protobuf.message import Message

    from gateway.live.reader import Reader
    from gateway.live.scheduler_link import Outgoing
    from tests.kit.fuzz.report import Report

TOKENIZER = load_tokenizer(Path(__file__).parents[3] / "models" / "demo")
FACTS = ModelFacts(TOKENIZER.model_digest, 4096, 1024, 16, "id", True)
GONE = BlockyardError(Reason.REQUEST_EXPIRED, "gone")


class Link:
    """A scheduler that answers at once, or not at all: each request gets two tokens and its end."""

    def __init__(self, *, answers: bool) -> None:
        self.facts: ModelFacts | None = FACTS
        self.loras: dict[str, Adapter] = {}
        self.is_ready = self.takes_requests = True
        self.has_other_model = False
        self.message = ""
        self.live: Any = None
        self.sent: list[Outgoing] = []
        self._answers = answers
        self._next_id = 1

    def send(self, item: Outgoing) -> None:
        self.sent.append(item)
        if self._answers:
            asyncio.get_running_loop().call_soon(self._answer, item)

    def _answer(self, item: Outgoing) -> None:
        if isinstance(item, Resume):
            self.live.on_progress(Progress(failed=[Failure(item.handle, GONE)]))
        elif isinstance(item, Add):
            first, n = self._next_id, item.submission.n
            self._next_id += 2 * n
            ids = list(range(first, first + n))
            ended = [Ending(sequence_id, FinishReason.LENGTH) for sequence_id in ids]
            update = TokenUpdate(ids * 2, [17] * (2 * n), ended)
            self.live.on_progress(Progress(accepted=[Acceptance(item.handle, first)], update=update))

    async def cancel(self, request_ids: Sequence[str]) -> Cancelled:
        return Cancelled()


class Context:
    """A call as its servicer sees it."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def peer(self) -> str:
        return "unix:"

    def time_remaining(self) -> None:
        return None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        pass

    def set_trailing_metadata(self, metadata: Any) -> None:
        pass

    async def write(self, message: Message) -> None:
        message.SerializeToString()


def make_service(*, answers: bool) -> tuple[Link, LiveRequests, GenerationService]:
    """A gateway without its server."""
    link = Link(answers=answers)
    live = link.live = LiveRequests(link)
    service = GenerationService()
    service.add_model("demo", TOKENIZER, link, live, seed=7)
    return link, live, service


def _spec(text: str = "Once upon a time") -> inference_pb2.GenerationSpec:
    sampling = sampling_pb2.SamplingParams(
        temperature=0.5, top_k=3, top_p=0.9, seed=5, logit_bias={5: 1.0}, bad_words=["no"], logprobs=2
    )
    stop = sampling_pb2.StopCriteria(max_tokens=8, min_tokens=1, stop_strings=["end"], stop_token_ids=[9])
    form = inference_pb2.OutputFormat(json_schema={"schema": '{"type": "array", "items": {"pattern": "a+"}}'})
    return inference_pb2.GenerationSpec(text=text, sampling=sampling, stop=stop, n=2, model="demo", format=form)


def bases() -> dict[str, Message]:
    """A good request for each public rpc."""
    m = inference_pb2
    position = m.Position(index=0, num_tokens=1, num_text_bytes=3, token_ids=[17])
    infer = open_inference_pb2.ModelInferRequest(model_name="demo", id="a")
    tensor = infer.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"Once")
    infer.parameters["max_tokens"].int64_param = 4
    chat = inference_pb2.GenerationSpec()
    chat.CopyFrom(_spec(""))
    part = chat.conversation.messages.add(role=inference_pb2.ROLE_USER).content.add()
    part.text = "Hello"
    return {
        "Generate": m.GenerateRequest(spec=_spec()),
        "StreamGenerate": m.StreamGenerateRequest(spec=_spec()),
        "Chat": m.ChatRequest(spec=chat),
        "StreamChat": m.StreamChatRequest(spec=chat),
        "ResumeGenerate": m.ResumeGenerateRequest(request_id="r", positions=[position], spec=_spec(), seed=7),
        "CancelGenerate": m.CancelGenerateRequest(request_ids=["a", "b"]),
        "Tokenize": m.TokenizeRequest(model="demo", text="Once"),
        "Detokenize": m.DetokenizeRequest(model="demo", token_ids=[17, 18]),
        "ListModels": m.ListModelsRequest(),
        "ModelInfer": infer,
        "ModelMetadata": open_inference_pb2.ModelMetadataRequest(name="demo"),
        "ModelReady": open_inference_pb2.ModelReadyRequest(name="demo"),
    }


async def fuzz_public(report: Report, rpc: str) -> None:
    """Requests of clients, changed."""
    _, live, service = make_service(answers=True)
    servicers = (InferenceServicer(service), OpenInferenceServicer(service))
    handler = next(getattr(servicer, rpc) for servicer in servicers if rpc in type(servicer).__dict__)
    base = bases()[rpc]
    for number in range(report.num_cases):
        changed = mutate(base, report.rng)
        if changed is None:
            report.outcomes["no message"] += 1
            continue
        with report.case():
            async with asyncio.timeout(10):
                await handler(changed, Context())
        if number % 1000 == 999:
            live.cancel([each.wire_id for each in live._registry.live])
    service.stop(BlockyardError(Reason.DRAINING, "over"))


class _Readers:
    """Keeps some requests running at a gateway, each read by a task."""

    def __init__(self, link: Link, service: GenerationService, rng: Random) -> None:
        self.link = link
        self._service = service
        self._rng = rng
        self._num = 0
        self.tasks: set[asyncio.Task[None]] = set()
        # First sequence id of each, by handle.
        self.first: dict[int, int] = {}

    async def fill(self) -> None:
        while len(self.tasks) < 6:
            self._num += 1
            request = GenerationRequest(prompt=(5, 6), request_id=f"r{self._num}", n=self._rng.choice((1, 2)))
            task = asyncio.create_task(self._read(await self._service.start(request)))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _read(self, reader: Reader) -> None:
        try:
            async for _ in reader:
                pass
        except BlockyardError:
            pass
        finally:
            reader.close()


def _told(readers: _Readers, rng: Random) -> scheduler_pb2.AttachResponse:
    """What a scheduler could say: it accepts what is new, and all that it has gets tokens."""
    message = scheduler_pb2.AttachResponse()
    for item in readers.link.sent:
        if isinstance(item, Add) and item.handle not in readers.first:
            readers.first[item.handle] = 10 * item.handle
            name = item.submission.request_id
            message.accepted.add(request_id=name, first_sequence_id=10 * item.handle, handle=item.handle)
    readers.link.sent.clear()
    firsts = list(readers.first.values())[-8:]
    for first in firsts:
        message.sequence_ids.append(first)
        message.token_ids.append(rng.randrange(4096))
        message.logprob_sequence_ids.append(first)
        message.logprobs.num_candidates.append(2)
        message.logprobs.token_ids.extend((5, 6))
        message.logprobs.logprobs.extend((-1.0, -2.0))
        message.logprobs.ranks.extend((2, 1))
    if firsts and rng.random() < 0.3:
        ended = rng.choice(firsts)
        message.finished_sequence_ids.append(ended)
        message.finish_reasons.append(sampling_pb2.FINISH_REASON_LENGTH)
        message.prefilled_sequence_ids.append(ended)
        message.num_cached_tokens.append(1)
        message.recovered.add(request_id="r1", cause="the worker was lost", num_replayed_tokens=3, exact=True)
        piece = message.prompt_logprobs.add(sequence_id=ended, first_position=1)
        piece.logprobs.num_candidates.append(1)
        piece.logprobs.token_ids.append(6)
        piece.logprobs.logprobs.append(-1.0)
    if rng.random() < 0.2 and readers.first:
        handle = rng.choice(list(readers.first))
        resumed = message.resumed.add(handle=handle, first_sequence_id=10 * handle)
        resumed.submission = encode_submission(Submission("r1", (5,), 1, SamplingParams(), 9, 0, ()))
        resumed.sequences.add(token_ids=[5, 6])
        message.failed.add(handle=handle, request_id="r1", status=to_status(GONE))
    if rng.random() < 0.2:
        message.readiness.ready = True
        facts = message.facts
        facts.model_digest, facts.vocab_size, facts.max_model_len = FACTS.model_digest, 4096, 1024
    return message


async def fuzz_attach_responses(report: Report) -> None:
    """Messages of schedulers, changed. One that cannot be taken costs the connection, as in the link, and no more."""
    link, live, service = make_service(answers=False)
    readers = _Readers(link, service, report.rng)
    for number in range(report.num_cases):
        await readers.fill()
        changed = mutate(_told(readers, report.rng), report.rng)
        if changed is None:
            report.outcomes["no message"] += 1
            continue
        try:
            live.on_progress(decode_progress(changed))
            report.outcomes["taken"] += 1
        except Exception as error:  # noqa: BLE001 - the link's boundary takes all of them
            report.outcomes[f"stream broken by {type(error).__name__}"] += 1
            live.on_scheduler_lost()
            readers.first.clear()
            live.on_progress(Progress(facts=FACTS))
        if number % 8 == 0:
            await asyncio.sleep(0)
    for task in readers.tasks:
        task.cancel()
    await asyncio.gather(*readers.tasks, return_exceptions=True)
    with report.case():
        await _check_that_it_serves(link, live, service)
    service.stop(BlockyardError(Reason.DRAINING, "over"))


async def _check_that_it_serves(link: Link, live: LiveRequests, service: GenerationService) -> None:
    """After all that a plain request is answered as ever."""
    live.cancel([each.wire_id for each in live._registry.live])
    live.on_scheduler_lost()
    live.on_progress(Progress(facts=FACTS))
    link._answers, link._next_id = True, 10**12
    reader = await service.start(GenerationRequest(prompt=(5, 6), request_id="last", n=2))
    async with asyncio.timeout(10):
        events = [event async for event in reader]
    reader.close()
    assert sum(type(event).__name__ == "Finished" for event in events) == 2
