"""The eight ways to ask a gateway for an answer, and what each of them says, in one form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import grpc.aio

from blockyard.common.v1 import sampling_pb2
from blockyard.errors import BlockyardError, Reason, Violation, from_rpc_error, from_status
from blockyard.inference.v1 import inference_pb2
from tests.unit.gateway.fronts.parity.asking import body_of, spec_of

if TYPE_CHECKING:
    import httpx

    from tests.unit.gateway.fronts.parity.asking import Ask

# A token's text and log probability, and those of the likeliest in its place, it among them.
Likely = tuple[str, float, frozenset[tuple[str, float]]]


class Front(NamedTuple):
    """A way to ask: what for ("text" or "chat"), over what ("grpc" or "http"), and whether in a stream."""

    family: str
    wire: str
    streams: bool

    @property
    def name(self) -> str:
        """Its name in ids of requests."""
        return f"{self.wire}-{self.family}-{'stream' if self.streams else 'whole'}"

    @property
    def method(self) -> str:
        """The call over gRPC."""
        return ("Stream" if self.streams else "") + {"text": "Generate", "chat": "Chat"}[self.family]

    @property
    def path(self) -> str:
        """The URL over HTTP."""
        return {"text": "/v1/completions", "chat": "/v1/chat/completions"}[self.family]


FRONTS = [
    Front(family, wire, streams)
    for family in ("text", "chat")
    for wire in ("grpc", "http")
    for streams in (False, True)
]


@dataclass(frozen=True)
class Refusal:
    """A failure. `status`: the code of gRPC or HTTP; None for one that comes in a stream of HTTP."""

    reason: Reason
    message: str
    violations: tuple[Violation, ...]
    status: grpc.StatusCode | int | None
    retry_after_seconds: float | None = None


@dataclass(frozen=True)
class Choice:
    """One sequence."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    matched: str | int | None
    logprobs: tuple[Likely, ...]
    score: float | None
    # Why it failed, if it did.
    error: tuple[Reason, str] | None = None


@dataclass(frozen=True)
class Answer:
    """A whole answer. Of the prompt's log probabilities: by place, (id, log probability, rank, text)."""

    choices: tuple[Choice, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    prompt_logprobs: tuple[frozenset[tuple[int, float, int, str]], ...] = ()


Outcome = Refusal | Answer


@dataclass
class Gateway:
    """The fronts of one gateway."""

    stub: Any
    http: httpx.AsyncClient

    async def ask(self, front: Front, asked: Ask) -> Outcome:
        """Asks for an answer."""
        if front.wire == "grpc":
            return await self._ask_grpc(front, spec_of(asked))
        return await self._ask_http(front, body_of(asked, front.family))

    async def _ask_grpc(self, front: Front, spec: inference_pb2.GenerationSpec) -> Outcome:
        request = getattr(inference_pb2, f"{front.method}Request")(spec=spec)
        call = getattr(self.stub, front.method)(request)
        try:
            if not front.streams:
                return _of_response(await call)
            return _of_events([message.event async for message in call])
        except grpc.aio.AioRpcError as error:
            told = from_rpc_error(error)
            return Refusal(told.reason, told.message, told.violations, error.code(), told.retry_after_seconds)
        finally:
            # By itself grpc forgets to when its reader is cancelled just as the request has gone out.
            call.cancel()

    async def resume_grpc(self, request_id: str) -> Answer:
        """Reads a request again from its beginning."""
        request = inference_pb2.ResumeGenerateRequest(request_id=request_id)
        return _of_events([message.event async for message in self.stub.ResumeGenerate(request)])

    async def _ask_http(self, front: Front, body: dict[str, Any]) -> Outcome:
        streaming = {"stream": True, "stream_options": {"include_usage": True}} if front.streams else {}
        content = json.dumps({**body, **streaming}).encode()
        headers = {"content-type": "application/json"}
        response = await self.http.post(front.path, content=content, headers=headers)
        if response.status_code != 200:
            return _of_error(response.json()["error"], response.status_code, response.headers.get("retry-after-ms"))
        return _of_body(response.json()) if not front.streams else of_stream(response.text)


# gRPC.


def _of_response(response: inference_pb2.GenerateResponse | inference_pb2.ChatResponse) -> Answer:
    choices = [
        _choice(each.text, tuple(each.token_ids), each.logprobs, each.finished)
        for each in sorted(response.choices, key=lambda choice: choice.index)
    ]
    usages = [choice.finished.usage for choice in response.choices]
    return _answer(response.accepted, choices, usages, response.prompt_logprobs)


def _of_events(events: list[inference_pb2.GenerationEvent]) -> Answer:
    assert events[0].HasField("accepted")
    finished = sorted((e.finished for e in events if e.HasField("finished")), key=lambda each: each.index)
    prompts = [event.prompt_logprobs for event in events if event.HasField("prompt_logprobs")]
    choices: list[Choice] = []
    for end in finished:
        deltas = [e.delta for e in events if e.HasField("delta") and e.delta.index == end.index]
        token_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
        logprobs = [each for delta in deltas for each in delta.logprobs]
        choices.append(_choice("".join(delta.text for delta in deltas), token_ids, logprobs, end))
    told = prompts[0] if prompts else inference_pb2.PromptLogprobs()
    return _answer(events[0].accepted, choices, [end.usage for end in finished], told)


def _choice(text: str, token_ids: tuple[int, ...], logprobs: Any, finished: inference_pb2.Finished) -> Choice:
    kind = finished.matched_stop.WhichOneof("stop")
    return Choice(
        text,
        token_ids,
        sampling_pb2.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower(),
        getattr(finished.matched_stop, kind) if kind else None,
        tuple(_likely(place) for place in logprobs),
        finished.score if finished.HasField("score") else None,
        _told_of(from_status(finished.error)) if finished.HasField("error") else None,
    )


def _told_of(error: BlockyardError) -> tuple[Reason, str]:
    return error.reason, error.message


def _likely(place: inference_pb2.TokenLogprobs) -> Likely:
    chosen = place.chosen
    top = {(token.text, token.logprob) for token in (chosen, *place.top)}
    return (chosen.text, chosen.logprob, frozenset(top))


def _answer(
    accepted: inference_pb2.Accepted,
    choices: list[Choice],
    usages: list[sampling_pb2.Usage],
    prompt: inference_pb2.PromptLogprobs,
) -> Answer:
    told = tuple(
        frozenset(
            (token.token_id, token.logprob, token.rank, token.text)
            for token in ((place.chosen, *place.top) if place.HasField("chosen") else ())
        )
        for place in prompt.logprobs
    )
    num_tokens = sum(usage.num_completion_tokens for usage in usages)
    return Answer(tuple(choices), accepted.num_prompt_tokens, usages[0].num_cached_tokens, num_tokens, told)


# HTTP.


def _of_error(error: dict[str, Any], status: int | None, retry_after_ms: str | None = None) -> Refusal:
    violations = tuple(
        Violation(told["param"], told["message"], Reason(told["code"])) for told in error.get("violations", ())
    )
    assert error["param"] == (violations[0].field if violations else None)
    retry = None if retry_after_ms is None else int(retry_after_ms) / 1000
    # What client libraries look for stands behind it.
    message = error["message"].removesuffix(f" ({error['code']})")
    return Refusal(Reason(error["reason"]), message, violations, status, retry)


def _of_body(body: dict[str, Any]) -> Answer:
    choices = body["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    prompt = body["prompt_logprobs"] if "prompt_logprobs" in body else choices[0].get("prompt_logprobs")
    return _of_parts([[choice] for choice in choices], body["usage"], prompt)


def of_stream(text: str) -> Outcome:
    """Reads a stream of server-sent events."""
    *events, last = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    if last != "[DONE]":
        return _of_error(json.loads(last)["error"], None)
    chunks = [json.loads(event) for event in events]
    parts: dict[int, list[dict[str, Any]]] = {}
    prompt: Any = None
    for chunk in chunks:
        prompt = chunk.get("prompt_logprobs", prompt)
        for choice in chunk["choices"]:
            prompt = choice.get("prompt_logprobs", prompt)
            parts.setdefault(choice["index"], []).append(choice)
    return _of_parts([parts[index] for index in sorted(parts)], chunks[-1].get("usage") or _NO_USAGE, prompt)


# Of a stream that was not asked for one.
_NO_USAGE: dict[str, Any] = {"prompt_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens": 0}


def _of_parts(choices: list[list[dict[str, Any]]], usage: dict[str, Any], prompt: Any) -> Answer:
    return Answer(
        tuple(_joined(parts) for parts in choices),
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["completion_tokens"],
        tuple(
            frozenset(
                (int(token_id), told["logprob"], told["rank"], told["decoded_token"])
                for token_id, told in (place or {}).items()
            )
            for place in prompt or ()
        ),
    )


def _joined(parts: list[dict[str, Any]]) -> Choice:
    """One choice of its parts: all of it, or the chunks of a stream."""
    last = parts[-1]
    return Choice(
        "".join(_text_of(part) for part in parts),
        tuple(token_id for part in parts for token_id in part.get("token_ids", ())),
        last["finish_reason"],
        last["stop_reason"],
        tuple(likely for part in parts if part["logprobs"] for likely in _likely_of(part["logprobs"])),
        last.get("score"),
        (Reason(last["error"]["code"]), last["error"]["message"]) if "error" in last else None,
    )


def _text_of(part: dict[str, Any]) -> str:
    if "text" in part:
        return part["text"]
    return part.get("message", part.get("delta")).get("content") or ""


def _likely_of(told: dict[str, Any]) -> list[Likely]:
    if "content" in told:
        return [
            (
                token["token"],
                token["logprob"],
                frozenset((each["token"], each["logprob"]) for each in (token, *token["top_logprobs"])),
            )
            for token in told["content"]
        ]
    rows = zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True)
    return [(text, value, frozenset({(text, value), *(top or {}).items()})) for text, value, top in rows]
