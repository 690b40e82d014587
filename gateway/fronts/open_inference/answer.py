"""Makes the answer to an inference request, complete or in pieces, from the events of the core.

Each element of a tensor belongs to one choice: element `prompt * n + index` to the sequence `index` of a prompt.
"""

from __future__ import annotations

import json
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blockyard.contract.events import Accepted, Delta, Event, Finished, TokenLogprobs
from gateway.fronts.open_inference.call import MODEL_VERSION, OUTPUTS, InferCall
from gateway.fronts.open_inference.tensors import InferResponse, Output
from gateway.fronts.openai import logprobs as shapes
from gateway.fronts.openai.call_readers import CallReaders

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from blockyard.errors import BlockyardError
    from gateway.generation import GenerationService

# The finish reason that Triton's vLLM backend returns for a choice that has not ended.
_UNFINISHED = b"None"


@dataclass(slots=True)
class _Choice:
    """A choice. `texts`, `logprobs` and `num_new_tokens` only cover the time since the last response."""

    num_prompt_tokens: int
    texts: list[str]
    logprobs: list[TokenLogprobs] = field(default_factory=list["TokenLogprobs"])
    num_new_tokens: int = 0
    num_tokens: int = 0
    cumulative_logprob: float = 0.0
    finish_reason: bytes = _UNFINISHED

    def advance(self, num_tokens: int) -> None:
        self.num_new_tokens += num_tokens - self.num_tokens
        self.num_tokens = num_tokens

    def clear(self) -> None:
        self.texts.clear()
        self.logprobs.clear()
        self.num_new_tokens = 0


_ELEMENTS: dict[str, Any] = {
    "text_output": lambda choice: "".join(choice.texts).encode(),
    "finish_reason": lambda choice: choice.finish_reason,
    "cumulative_logprob": lambda choice: choice.cumulative_logprob,
    "logprobs": lambda choice: json.dumps(shapes.prompt_logprobs(choice.logprobs)).encode(),
    "num_input_tokens": lambda choice: choice.num_prompt_tokens,
    "num_output_tokens": lambda choice: choice.num_new_tokens,
}


class Answer:
    """Collects events, and makes responses with the output since the last response."""

    def __init__(self, call: InferCall, accepted: Sequence[Accepted]) -> None:
        self._call = call
        self._model = accepted[0].model
        self._num_unfinished = len(accepted) * call.call.n
        # The errors of failed choices, by the number of the choice.
        self._errors: dict[int, BlockyardError] = {}
        prefixes = call.prefixes or ("",) * len(accepted)
        self._choices = [
            _Choice(prompt.num_prompt_tokens, [prefix])
            for prompt, prefix in zip(accepted, prefixes, strict=True)
            for _ in range(call.call.n)
        ]

    def add(self, prompt: int, event: Event) -> bool:
        """Adds an event of the prompt number `prompt`; returns whether it adds output to the next response."""
        if not isinstance(event, Delta | Finished):
            return False
        number = prompt * self._call.call.n + event.index
        choice = self._choices[number]
        if isinstance(event, Delta):
            choice.advance(event.num_tokens)
            choice.texts.append(event.text)
            choice.logprobs.extend(event.logprobs)
            choice.cumulative_logprob += sum(entry.chosen.logprob for entry in event.logprobs if entry.chosen)
        else:
            choice.advance(event.usage.num_completion_tokens)
            choice.finish_reason = event.finish_reason.value.encode()
            self._num_unfinished -= 1
            if event.error is not None:
                self._errors[number] = event.error
        return True

    def take(self) -> InferResponse:
        """Returns a response with the output since the last call."""
        response = InferResponse(
            name=self._call.name,
            model_name=self._model,
            model_version=MODEL_VERSION,
            is_final=self.is_whole,
            errors={number: str(error) for number, error in self._errors.items()},
            outputs=[self._output(name) for name in self._call.outputs],
            is_raw=self._call.is_raw,
        )
        for choice in self._choices:
            choice.clear()
        return response

    def _output(self, name: str) -> Output:
        # num_input_tokens has one element for each prompt, not for each choice.
        choices = self._choices[:: self._call.call.n] if name == "num_input_tokens" else self._choices
        return Output(name, OUTPUTS[name].datatype, list(map(_ELEMENTS[name], choices)))

    @property
    def has_failed(self) -> bool:
        return len(self._errors) == len(self._choices)

    @property
    def is_whole(self) -> bool:
        return not self._num_unfinished


@asynccontextmanager
async def started(
    generation: GenerationService, call: InferCall
) -> AsyncGenerator[AsyncGenerator[InferResponse, None], None]:
    """Starts a request, waits until it is queued, and gives an iterator of its responses.

    A stream has several responses, other requests have one, at their end. On exit, closes the request's readers.
    Raises BlockyardError, and so do the responses.
    """
    readers = CallReaders(generation)
    try:
        await readers.start(call.call)
        async with aclosing(_responses(call, readers)) as responses:
            yield responses
    finally:
        await readers.aclose()


async def _responses(call: InferCall, readers: CallReaders) -> AsyncGenerator[InferResponse, None]:
    answer = Answer(call, readers.accepted)
    if not call.stream:
        readers.be_patient()
    async with aclosing(readers.events()) as events:
        async for prompt, event in events:
            # If all choices failed, the error replaces the last response.
            if answer.add(prompt, event) and call.stream and not answer.has_failed:
                yield answer.take()
    if not call.stream:
        yield answer.take()
