"""Makes answers in OpenAI's form, complete or as the chunks of a stream, from the events of the core.

For speed, chunks are not validated, and a chunk of text is joined from parts that were encoded once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any

from blockyard.contract.events import (
    Accepted,
    Delta,
    Event,
    Finished,
    Loading,
    PromptLogprobs,
    Recovered,
    TokenLogprobs,
    join_calls,
)
from blockyard.contract.sampling import FinishReason, PredictionUsage
from gateway.fronts.http_calls.streaming import encode_json
from gateway.fronts.openai import logprobs as shapes
from gateway.fronts.openai.errors import make_error_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.fronts.openai.call_spec import CallSpec


def _reasoning_fields(text: str) -> dict[str, Any]:
    # vLLM's former name for reasoning, which most clients read, and its newer name.
    return {"reasoning_content": text, "reasoning": text} if text else {}


def parsed_fields(deltas: Sequence[Delta], *, hides_reasoning: bool) -> dict[str, Any]:
    """Returns the fields of a message for reasoning and tool calls; empty if the answer has neither."""
    fields = {} if hides_reasoning else _reasoning_fields("".join(delta.reasoning_text for delta in deltas))
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in join_calls(deltas)
    ]
    return fields | ({"tool_calls": calls} if calls else {})


def parsed_delta(delta: Delta, *, hides_reasoning: bool) -> dict[str, Any]:
    """Returns the fields of a stream's delta for reasoning and tool calls; empty if the delta has neither."""
    fields = {} if hides_reasoning else _reasoning_fields(delta.reasoning_text)
    calls: list[dict[str, Any]] = []
    for call in delta.tool_calls:
        head = {"id": call.id, "type": "function"} if call.name else {}
        function = {"name": call.name} if call.name else {}
        calls.append({"index": call.index, **head, "function": {**function, "arguments": call.arguments}})
    return fields | ({"tool_calls": calls} if calls else {})


@dataclass(slots=True)
class Tally:
    """Counts the tokens of a call, for `usage`. `count_tokens`: returns the number of tokens of a text by itself."""

    count_tokens: Callable[[str], int]
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_virtual_tokens: int = 0
    prediction: PredictionUsage | None = None
    # The completion tokens of each choice, and the pieces of its reasoning.
    num_tokens: dict[int, int] = field(default_factory=dict[int, int])
    reasoning: defaultdict[int, list[str]] = field(default_factory=lambda: defaultdict[int, list[str]](list))

    def add_prompt(self, accepted: Accepted) -> None:
        """Counts the tokens of a prompt, once for all of its choices."""
        self.num_prompt_tokens += accepted.num_prompt_tokens

    def add_choice(self, number: int, finished: Finished) -> None:
        self.num_tokens[number] = finished.usage.num_completion_tokens
        if finished.usage.prediction is not None:
            self.prediction = (self.prediction or PredictionUsage()).plus(*finished.usage.prediction)
        if finished.index == 0:
            self.num_cached_tokens += finished.usage.num_cached_tokens
            self.num_virtual_tokens += finished.usage.num_virtual_tokens

    def usage(self) -> dict[str, Any]:
        details = {"cached_tokens": self.num_cached_tokens}
        if self.num_virtual_tokens:
            details["virtual_tokens"] = self.num_virtual_tokens
        completion_details: dict[str, int] = {}
        if num_reasoning_tokens := self._num_reasoning_tokens():
            completion_details["reasoning_tokens"] = num_reasoning_tokens
        if self.prediction is not None:
            completion_details["accepted_prediction_tokens"] = self.prediction.num_accepted_tokens
            completion_details["rejected_prediction_tokens"] = self.prediction.num_rejected_tokens
        fields = {"prompt_tokens_details": details}
        if completion_details:
            fields["completion_tokens_details"] = completion_details
        return self.usage_so_far() | fields

    def _num_reasoning_tokens(self) -> int:
        counts = {number: self.count_tokens("".join(pieces)) for number, pieces in self.reasoning.items()}
        return sum(min(count, self.num_tokens.get(number, 0)) for number, count in counts.items())

    def usage_so_far(self) -> dict[str, Any]:
        """Returns the part of `usage` that is known before the end of the answer."""
        num_completion_tokens = sum(self.num_tokens.values())
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + num_completion_tokens,
        }


def _head(call: CallSpec, accepted: Accepted, created: int, *, chunk: bool, fingerprint: str) -> dict[str, Any]:
    kind = ("chat.completion.chunk" if chunk else "chat.completion") if call.is_chat else "text_completion"
    return {
        "id": call.call_id,
        "object": kind,
        "created": created,
        "model": accepted.model,
        "system_fingerprint": fingerprint or None,
    }


def _warnings(accepted: Sequence[Accepted]) -> dict[str, Any]:
    """Returns the client's warnings, each once; an empty object without any."""
    warnings = dict.fromkeys(warning for item in accepted for warning in item.warnings)
    return {"warnings": list(warnings)} if warnings else {}


def _ending(finished: Finished) -> dict[str, Any]:
    reason = finished.finish_reason
    label = "tool_calls" if finished.calls_tools and reason is FinishReason.STOP else reason.value
    fields: dict[str, Any] = {"finish_reason": label, "stop_reason": finished.matched_stop}
    if finished.score is not None:
        fields["score"] = finished.score
    if finished.error is not None:
        fields["error"] = make_error_fields(finished.error)
    return fields


class _ChoiceLogprobs:
    """Makes the `logprobs` of one choice piece by piece. A completion's text offsets include its echo."""

    def __init__(self, call: CallSpec, prompt: int) -> None:
        self._call = call
        self._prompt = prompt
        self._offsets = shapes.TextOffsets()

    def echo(self, prompt_logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Returns the `logprobs` of the echoed prompt; the offsets of the answer continue after it."""
        first_token = self._call.first_tokens[self._prompt]
        if self._call.tokens_as_ids:
            prompt_logprobs = shapes.name_by_ids(prompt_logprobs)
            first_token = (shapes.name_of(self._call.prompt_token_ids(self._prompt)[0]), first_token[1])
        logprobs = shapes.echo_logprobs(first_token, prompt_logprobs, self._offsets)
        self._offsets = shapes.TextOffsets(len(self._call.echoes[self._prompt]))
        return logprobs

    def more(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        if self._call.tokens_as_ids:
            entries = shapes.name_by_ids(entries)
        if self._call.is_chat:
            return shapes.chat_logprobs(entries)
        return shapes.completion_logprobs(entries, self._offsets)


@dataclass(slots=True)
class _Choice:
    echo: str = ""
    deltas: list[Delta] = field(default_factory=list[Delta])
    finished: Finished | None = None


class WholeAnswer:
    """Collects the events of a call that is not streamed, and makes its complete answer."""

    def __init__(
        self, call: CallSpec, accepted: list[Accepted], created: int, count_tokens: Callable[[str], int]
    ) -> None:
        self._call = call
        self._accepted = accepted[0]
        self._warnings = _warnings(accepted)
        self._created = created
        self._tally = Tally(count_tokens)
        for item in accepted:
            self._tally.add_prompt(item)
        self._choices = [_Choice() for _ in range(call.n * len(call.requests))]
        self._prompt_logprobs: dict[int, Sequence[TokenLogprobs]] = {}
        for prompt, echo in enumerate(call.echoes):
            for choice in self._choices[prompt * call.n : (prompt + 1) * call.n]:
                choice.echo = echo

    def add(self, prompt: int, event: Event) -> None:
        if isinstance(event, Accepted | Recovered | Loading):
            return
        if isinstance(event, PromptLogprobs):
            self._prompt_logprobs[prompt] = event.logprobs
            return
        number = prompt * self._call.n + event.index
        choice = self._choices[number]
        if isinstance(event, Delta):
            choice.deltas.append(event)
            if event.reasoning_text:
                self._tally.reasoning[number].append(event.reasoning_text)
        else:
            choice.finished = event
            self._tally.add_choice(number, event)

    def encode(self) -> bytes:
        first = self._choices[0].finished
        fingerprint = first.determinism_id if first else ""
        body = _head(self._call, self._accepted, self._created, chunk=False, fingerprint=fingerprint)
        body["choices"] = [self._choice(number, choice) for number, choice in enumerate(self._choices)]
        body["usage"] = self._tally.usage()
        body |= self._warnings
        if self._call.is_chat and self._call.returns_token_ids:
            body["prompt_token_ids"] = self._call.prompt_token_ids(0)
        if self._call.is_chat and self._call.tells_prompt_logprobs:
            body["prompt_logprobs"] = shapes.prompt_logprobs(self._prompt_logprobs.get(0, ()))
        return encode_json(body).encode()

    def _choice(self, number: int, choice: _Choice) -> dict[str, Any]:
        text = choice.echo + "".join(delta.text for delta in choice.deltas)
        fields: dict[str, Any] = {"index": number, "logprobs": self._logprobs(number // self._call.n, choice)}
        if self._call.is_chat:
            parsed = parsed_fields(choice.deltas, hides_reasoning=self._call.hides_reasoning)
            content = None if "tool_calls" in parsed and not text else text
            fields["message"] = {"role": "assistant", "content": content, "refusal": None} | parsed
        else:
            fields |= {"text": text} | self._prompt(number // self._call.n)
        if choice.finished is not None:
            fields |= _ending(choice.finished)
        if self._call.returns_token_ids:
            fields["token_ids"] = [token_id for delta in choice.deltas for token_id in delta.token_ids]
        return fields

    def _prompt(self, prompt: int) -> dict[str, Any]:
        """Returns the fields of a completion's choice that describe its prompt."""
        fields: dict[str, Any] = {}
        if self._call.returns_token_ids:
            fields["prompt_token_ids"] = self._call.prompt_token_ids(prompt)
        if self._call.tells_prompt_logprobs:
            fields["prompt_logprobs"] = shapes.prompt_logprobs(self._prompt_logprobs.get(prompt, ()))
        return fields

    def _logprobs(self, prompt: int, choice: _Choice) -> dict[str, Any] | None:
        if not self._call.returns_logprobs:
            return None
        logprobs = _ChoiceLogprobs(self._call, prompt)
        entries = [entry for delta in choice.deltas for entry in delta.logprobs]
        if not self._call.echoes_logprobs:
            return logprobs.more(entries)
        echo = logprobs.echo(self._prompt_logprobs.get(prompt, ()))
        return shapes.join_rows(echo, logprobs.more(entries))


class ChunkedAnswer:
    """Makes the chunks of a stream, as JSON texts."""

    def __init__(
        self,
        call: CallSpec,
        accepted: list[Accepted],
        created: int,
        fingerprint: str,
        count_tokens: Callable[[str], int],
    ) -> None:
        self._call = call
        self._tally = Tally(count_tokens)
        for item in accepted:
            self._tally.add_prompt(item)
        head = encode_json(_head(call, accepted[0], created, chunk=True, fingerprint=fingerprint))
        # All chunks have the same beginning and end; only the choice in between differs.
        self._before = head[:-1] + ',"choices":['
        self._after = '],"usage":null}' if call.include_usage else "]}"
        self._warnings = _warnings(accepted)
        self._num_unfinished = call.n * len(call.requests)
        self._before_text = '"delta":{"content":' if call.is_chat else '"text":'
        unfinished = encode_json(_UNFINISHED)[1:-1]
        self._after_text = f"}},{unfinished}" if call.is_chat else f",{unfinished}"
        self._logprobs: dict[int, _ChoiceLogprobs] = {}
        if call.returns_logprobs:
            numbers = range(call.n * len(call.requests))
            self._logprobs = {number: _ChoiceLogprobs(call, number // call.n) for number in numbers}

    def openings(self) -> list[str]:
        """Returns the chunks before each choice's first token: a chat's role, the echo, the prompt's ids.

        An echo with log probabilities is sent later, when the log probabilities come.
        """
        echoes = () if self._call.echoes_logprobs else self._call.echoes
        chunks: list[str] = []
        for number in range(self._call.n * len(self._call.requests)):
            prompt = number // self._call.n
            extra: dict[str, Any] = {}
            if self._call.returns_token_ids:
                extra = {"prompt_token_ids": self._call.prompt_token_ids(prompt)}
            if self._call.is_chat:
                delta = {"role": "assistant", "content": "".join(echoes)}
                chunks.append(self._chunk({"index": number, "delta": delta, **_UNFINISHED, **extra}))
            elif echoes or extra:
                text = echoes[prompt] if echoes else ""
                chunks.append(self._chunk({"index": number, "text": text, **_UNFINISHED, **extra}))
        return chunks

    def add(self, prompt: int, event: Event) -> str | None:
        """Makes the chunk for an event of the request number `prompt`; None if the event has no chunk."""
        if isinstance(event, Accepted | Recovered | Loading):
            return None
        if isinstance(event, PromptLogprobs):
            return self._prompt(prompt, event.logprobs)
        number = prompt * self._call.n + event.index
        if isinstance(event, Delta):
            if self._call.continuous_usage:
                self._tally.num_tokens[number] = event.num_tokens
            return self._delta(number, event)
        self._tally.add_choice(number, event)
        self._num_unfinished -= 1
        fields: dict[str, Any] = {"delta": {}} if self._call.is_chat else {"text": ""}
        chunk = self._chunk({"index": number, **fields, "logprobs": None, **_ending(event)})
        is_last = not self._num_unfinished and not self._call.include_usage
        return self._with_warnings(chunk) if is_last else chunk

    def _delta(self, number: int, delta: Delta) -> str | None:
        parsed = {}
        if delta.reasoning_text or delta.tool_calls:
            if delta.reasoning_text:
                self._tally.reasoning[number].append(delta.reasoning_text)
            parsed = parsed_delta(delta, hides_reasoning=self._call.hides_reasoning)
        if not (delta.text or delta.token_ids or delta.logprobs or parsed):
            return None
        if self._logprobs or parsed:
            return self._uncommon_delta(number, delta, parsed)
        # The hot path: put the changing values between parts that were encoded once.
        token_ids = f',"token_ids":{list(delta.token_ids)}' if self._call.returns_token_ids else ""
        content = f"{self._before_text}{encode_basestring(delta.text)}{self._after_text}"
        return f'{self._before}{{"index":{number},{content}{token_ids}}}{self._end()}'

    def _uncommon_delta(self, number: int, delta: Delta, parsed: dict[str, Any]) -> str:
        fields: dict[str, Any] = {"text": delta.text}
        if self._call.is_chat:
            fields = {"delta": {"content": delta.text} | parsed if delta.text or not parsed else parsed}
        if self._call.returns_token_ids:
            fields["token_ids"] = delta.token_ids
        logprobs = self._logprobs[number].more(delta.logprobs) if self._logprobs else None
        return self._chunk({"index": number, **fields, **_UNFINISHED, "logprobs": logprobs})

    def _prompt(self, prompt: int, entries: Sequence[TokenLogprobs]) -> str | None:
        """Makes the chunk with a prompt's log probabilities for all of its choices; None if the client wants none.

        The chunk has the echo with its log probabilities, `prompt_logprobs`, or both.
        """
        fields = {"prompt_logprobs": shapes.prompt_logprobs(entries)} if self._call.tells_prompt_logprobs else {}
        numbers = range(prompt * self._call.n, (prompt + 1) * self._call.n)
        if self._call.is_chat:
            choice = encode_json({"index": numbers[0], "delta": {}, **_UNFINISHED})
            return f"{self._before}{choice}],{encode_json(fields)[1:-1]}{self._end()[1:]}" if fields else None
        if not (fields or self._call.echoes_logprobs):
            return None
        choices = [encode_json({**self._echo(number, prompt, entries), **fields}) for number in numbers]
        return f"{self._before}{','.join(choices)}{self._end()}"

    def _echo(self, number: int, prompt: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        choice = {"index": number, "text": "", **_UNFINISHED}
        if not self._call.echoes_logprobs:
            return choice
        return choice | {"text": self._call.echoes[prompt], "logprobs": self._logprobs[number].echo(entries)}

    def _chunk(self, choice: dict[str, Any]) -> str:
        return f"{self._before}{encode_json(choice)}{self._end()}"

    def _end(self) -> str:
        """Returns the part of a chunk after its choices."""
        if not self._call.continuous_usage:
            return self._after
        return f'],"usage":{encode_json(self._tally.usage_so_far())}}}'

    def usage(self) -> str | None:
        """Returns the last chunk, which has usage and no choices; None if the client did not ask for usage."""
        if not self._call.include_usage:
            return None
        return self._with_warnings(f'{self._before}],"usage":{encode_json(self._tally.usage())}}}')

    def _with_warnings(self, chunk: str) -> str:
        return f"{chunk[:-1]},{encode_json(self._warnings)[1:]}" if self._warnings else chunk


_UNFINISHED: dict[str, Any] = {"logprobs": None, "finish_reason": None}
