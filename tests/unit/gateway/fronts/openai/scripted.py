"""A stand-in for the gateway's core that plays a script, for what the real one does only by accident or failure."""

from __future__ import annotations

import asyncio
import json
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from blockyard.clock import SYSTEM, Clock
from blockyard.contract.chat import Conversation
from blockyard.contract.events import (
    Accepted,
    Delta,
    Finished,
    Recovered,
    TokenLogprob,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)
from blockyard.contract.models import Model
from blockyard.contract.sampling import FinishReason
from blockyard.errors import BlockyardError, Reason
from gateway.chat import prompt_of
from gateway.generation import GenerationService
from gateway.request import ReturnedLogprob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from blockyard.contract.events import Event
    from gateway.request import GenerationRequest

    Step = Event | BaseException | asyncio.Event


class CharacterTokenizer:
    """A token for each character: its code point. 1 is a begin token, which is left out of texts."""

    has_chat_template = True
    dialect = None

    def token_texts(self, *, skip_special_tokens: bool = True) -> CharacterTokenizer:
        return self

    def of(self, token_id: int) -> tuple[str, bytes]:
        return ("<s>", b"") if token_id == 1 else (chr(token_id), chr(token_id).encode())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(token_id) for token_id in token_ids)

    def piece(self, token_id: int) -> str:
        return f"'{chr(token_id)}'"

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, tools: Any = None, **kwargs: Any
    ) -> str:
        lines = [_line(message) for message in messages]
        lines += [f"{name}={value}" for name, value in kwargs.items()]
        lines += [f"tool={json.dumps(tool['function'])}" for tool in tools or ()]
        return "|".join(lines) + "|assistant:" * add_generation_prompt


def _line(message: dict[str, Any]) -> str:
    """A message: `role:content`, and behind it what it has besides."""
    said = f"{message['role']}:{message['content']}"
    return said + "".join(
        f"[{name}={json.dumps(message[name])}]" for name in ("tool_calls", "tool_call_id") if name in message
    )


class ScriptedGeneration:
    """Plays steps: yields events, raises exceptions, waits for asyncio events."""

    def __init__(self, request: GenerationRequest, steps: Sequence[Step]) -> None:
        self.request = request
        self.request_id = request.request_id
        self.front_state = request.front_state
        self._steps = list(steps)
        self.closed = asyncio.Event()
        self.is_patient = False
        # As a reader has it: each of the sequences has failed by itself.
        errors = [step.error for step in steps if isinstance(step, Finished)]
        self.failure = errors[0] if errors and all(errors) else None

    def be_patient(self) -> None:
        self.is_patient = True

    def find_token_ids(self, index: int) -> array[int]:
        """Only checksums are made of them."""
        return array("I")

    def __aiter__(self) -> ScriptedGeneration:
        return self

    async def __anext__(self) -> Event:
        while self._steps:
            step = self._steps.pop(0)
            if isinstance(step, BaseException):
                raise step
            if not isinstance(step, asyncio.Event):
                return step
            await step.wait()
        raise self.failure or StopAsyncIteration

    async def aclose(self) -> None:
        self.closed.set()


class ScriptedService:
    """Answers every request with the same script; is also its only model."""

    vocab_size = 256
    clock: Clock = SYSTEM
    readiness_message = "no worker is ready"

    def __init__(self) -> None:
        self.ready = True
        self.tokenizer = CharacterTokenizer()
        self.requests: list[GenerationRequest] = []
        self.generations: list[ScriptedGeneration] = []
        self.started = asyncio.Event()
        self.script: Callable[[GenerationRequest], Sequence[Step]] = answer("Hello")

    async def start(self, request: GenerationRequest, positions: Any = None, *, replay: bool) -> ScriptedGeneration:
        if isinstance(request.prompt, Conversation):
            request = replace(request, prompt=prompt_of(request.prompt, self.tokenizer))
        self.requests.append(request)
        steps = list(self.script(request))
        if steps and isinstance(steps[0], BlockyardError):
            raise steps[0]
        self.generations.append(ScriptedGeneration(request, steps))
        self.started.set()
        return self.generations[-1]

    def model_of(self, name: str) -> ScriptedService:
        return self

    @property
    def link(self) -> SimpleNamespace:
        return SimpleNamespace(facts=next(iter(self.models()), None))

    async def find_tokenizer(self, name: str) -> CharacterTokenizer:
        return self.tokenizer

    async def token_counter(self, model: str) -> Callable[[str], int]:
        tokenizer = await self.find_tokenizer(model)
        return lambda text: len(tokenizer.encode(text, add_special_tokens=False)) if text else 0

    async def prompt_of(self, request: GenerationRequest) -> Sequence[int]:
        token_ids = self._prompt_of(request)[-(request.truncate_prompt_tokens or 0) :]
        return token_ids if isinstance(request.prompt, tuple) else array("I", token_ids)

    async def text_of(
        self, token_ids: Sequence[int], model: str, tenant: str, *, skip_special_tokens: bool = True
    ) -> str:
        return self.tokenizer.decode(token_ids)

    async def run(self, work: Callable[[], Any], tenant: str, size: int) -> Any:
        return work()

    def _prompt_of(self, request: GenerationRequest) -> tuple[int, ...]:
        prompt = request.prompt
        if isinstance(prompt, Conversation):
            return tuple(self.tokenizer.encode(prompt_of(prompt, self.tokenizer), add_special_tokens=False))
        return tuple(self.tokenizer.encode(prompt, request.add_special_tokens)) if isinstance(prompt, str) else prompt

    def is_ready(self) -> bool:
        return self.ready

    def is_loading(self, name: str) -> bool:
        return False

    find_model = GenerationService.find_model

    def models(self) -> list[Model]:
        return [Model("scripted", 64, 256, True, "d-1", True)] if self.ready else []

    def resolve_model(self, name: str) -> None:
        if name not in ("", "scripted"):
            raise BlockyardError(Reason.MODEL_NOT_FOUND, f"the model {name!r} is not served here")


def accepted(request: GenerationRequest) -> Accepted:
    """The first event of a request."""
    return Accepted(request.request_id, len(request.prompt), request.sampling.seed or 0, "scripted")


def deltas(text: str, index: int = 0) -> list[Event]:
    """A delta for each character."""
    return [Delta(index, character, (ord(character),), number + 1, number + 1) for number, character in enumerate(text)]


def token(token_id: int, logprob: float, rank: int) -> TokenLogprob:
    """What is told of a token of CharacterTokenizer."""
    text, raw = CharacterTokenizer().of(token_id)
    return ReturnedLogprob(token_id, text, logprob, rank, raw)


def likely(text: str, *, num_top: int = 1) -> tuple[TokenLogprobs, ...]:
    """What is told of a text's tokens: their places make them less likely, and "?" and "!" are always the likeliest."""
    top = (token(ord("?"), -0.25, 1), token(ord("!"), -0.5, 2))[:num_top]
    return tuple(TokenLogprobs(token(ord(c), -1.0 - i, 3 + i), top) for i, c in enumerate(text))


def finished(
    num_tokens: int, index: int = 0, reason: FinishReason = FinishReason.STOP, matched: str | int | None = None
) -> Finished:
    """The end of a sequence."""
    return Finished(index, reason, matched, Usage(3, 2, num_tokens), "d-1")


# What is told of an answer that thinks, says something and calls two tools, one of them without arguments.
THOUGHT, SAID, ARGUMENTS = "A file, or two?", "I look.", '{"path": "a \\"b\\"", "lines": [1, 2]}'


def calling(request: GenerationRequest, *, size: int = 1) -> Sequence[Step]:
    """A script of that answer, in pieces of so many characters."""
    calls = [
        ToolCallDelta(0, "call_1", "read"),
        *(ToolCallDelta(0, arguments=piece) for piece in cut(ARGUMENTS, size)),
        ToolCallDelta(1, "call_2", "list"),
        ToolCallDelta(1, arguments="{}"),
    ]
    steps: list[Step] = [accepted(request)]
    steps += [Delta(0, "", (), 1, 1, reasoning_text=piece) for piece in cut(THOUGHT, size)]
    steps += [Delta(0, piece, (), 1, 1) for piece in cut(SAID, size)]
    steps += [Delta(0, "", (), 1, 1, tool_calls=(call,)) for call in calls]
    return [*steps, replace(finished(30), calls_tools=True)]


def cut(text: str, size: int) -> list[str]:
    """Cuts a text into pieces."""
    return [text[begin : begin + size] for begin in range(0, len(text), size)]


def answer(text: str) -> Callable[[GenerationRequest], Sequence[Step]]:
    """A script that answers every sequence of a request with a text."""

    def script(request: GenerationRequest) -> Sequence[Step]:
        steps: list[Step] = [accepted(request)]
        for index in range(request.n):
            # Which HTTP has no words for.
            steps += [*deltas(text, index), Recovered("lost", 1, True), finished(len(text), index)]
        return steps

    return script
