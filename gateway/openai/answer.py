"""Answers in OpenAI's form, whole or as the chunks of a stream, made from the events of the core.

Nothing is validated on the way of a token, and a chunk of text is put together from parts that are encoded once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any

from gateway.request import Accepted, Delta, FinishReason, PromptLogprobs, Recovered

if TYPE_CHECKING:
    from gateway.openai.call import Call
    from gateway.request import Event, Finished

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(slots=True)
class Tally:
    """Counts what a call cost, for `usage`."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0

    def add_prompt(self, accepted: Accepted) -> None:
        """Counts a prompt, once however many choices it has."""
        self.num_prompt_tokens += accepted.num_prompt_tokens

    def add_choice(self, finished: Finished) -> None:
        """Counts a choice that ended."""
        self.num_completion_tokens += finished.num_completion_tokens
        if finished.index == 0:
            self.num_cached_tokens += finished.num_cached_tokens

    def usage(self) -> dict[str, Any]:
        """Gives the API's `usage`."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


def _head(call: Call, accepted: Accepted, created: int, *, chunk: bool, fingerprint: str) -> dict[str, Any]:
    kind = ("chat.completion.chunk" if chunk else "chat.completion") if call.is_chat else "text_completion"
    return {
        "id": call.call_id,
        "object": kind,
        "created": created,
        "model": accepted.model,
        "system_fingerprint": fingerprint or None,
    }


def _ending(finished: Finished) -> dict[str, Any]:
    return {"finish_reason": finished.reason.value, "stop_reason": finished.matched}


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    finished: Finished | None = None


class WholeAnswer:
    """Collects the events of a call whose answer is told at once."""

    def __init__(self, call: Call, accepted: list[Accepted], created: int) -> None:
        self._call = call
        self._accepted = accepted[0]
        self._created = created
        self._tally = Tally()
        for item in accepted:
            self._tally.add_prompt(item)
        self._choices = [_Choice() for _ in range(call.n * len(call.requests))]
        for prompt, echo in enumerate(call.echoes):
            for choice in self._choices[prompt * call.n : (prompt + 1) * call.n]:
                choice.texts.append(echo)

    def add(self, prompt: int, event: Event) -> None:
        """Takes an event of the request number `prompt`."""
        if isinstance(event, Accepted | PromptLogprobs | Recovered):
            return
        choice = self._choices[prompt * self._call.n + event.index]
        if isinstance(event, Delta):
            choice.texts.append(event.text)
            choice.token_ids.extend(event.token_ids)
        else:
            choice.finished = event
            self._tally.add_choice(event)

    def encode(self) -> bytes:
        """Gives the answer's body."""
        first = self._choices[0].finished
        fingerprint = first.determinism_id if first else ""
        body = _head(self._call, self._accepted, self._created, chunk=False, fingerprint=fingerprint)
        body["choices"] = [self._choice(number, choice) for number, choice in enumerate(self._choices)]
        body["usage"] = self._tally.usage()
        if self._call.is_chat and self._call.returns_token_ids:
            body["prompt_token_ids"] = self._call.prompt_token_ids(0)
        return _encode(body).encode()

    def _choice(self, number: int, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        told: dict[str, Any] = {"index": number, "logprobs": None}
        if self._call.is_chat:
            told["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            told["text"] = text
        if choice.finished is not None:
            told |= _ending(choice.finished)
        if self._call.returns_token_ids:
            told["token_ids"] = choice.token_ids
            if not self._call.is_chat:
                told["prompt_token_ids"] = self._call.prompt_token_ids(number // self._call.n)
        return told


class ChunkedAnswer:
    """Makes the chunks of a stream, as JSON texts."""

    def __init__(self, call: Call, accepted: list[Accepted], created: int, fingerprint: str) -> None:
        self._call = call
        self._tally = Tally()
        for item in accepted:
            self._tally.add_prompt(item)
        head = _encode(_head(call, accepted[0], created, chunk=True, fingerprint=fingerprint))
        # All chunks begin and end alike; only a choice stands between.
        self._before = head[:-1] + ',"choices":['
        self._after = '],"usage":null}' if call.include_usage else "]}"
        self._before_text = '"delta":{"content":' if call.is_chat else '"text":'
        unfinished = _encode(_UNFINISHED)[1:-1]
        self._after_text = f"}},{unfinished}" if call.is_chat else f",{unfinished}"

    def openings(self) -> list[str]:
        """Gives what each choice begins with, before its first token: a chat's role, the echo, the prompt's ids."""
        chunks: list[str] = []
        for number in range(self._call.n * len(self._call.requests)):
            prompt = number // self._call.n
            extra: dict[str, Any] = {}
            if self._call.returns_token_ids:
                extra = {"prompt_token_ids": self._call.prompt_token_ids(prompt)}
            if self._call.is_chat:
                delta = {"role": "assistant", "content": ""}
                chunks.append(self._chunk({"index": number, "delta": delta, **_UNFINISHED, **extra}))
            elif self._call.echoes or extra:
                text = self._call.echoes[prompt] if self._call.echoes else ""
                chunks.append(self._chunk({"index": number, "text": text, **_UNFINISHED, **extra}))
        return chunks

    def add(self, prompt: int, event: Event) -> str | None:
        """Makes the chunk of an event of the request number `prompt`, if it has one."""
        if isinstance(event, Accepted | PromptLogprobs | Recovered):
            return None
        number = prompt * self._call.n + event.index
        if isinstance(event, Delta):
            return self._delta(number, event)
        self._tally.add_choice(event)
        if event.reason is FinishReason.ERROR:
            return None
        told: dict[str, Any] = {"delta": {}} if self._call.is_chat else {"text": ""}
        return self._chunk({"index": number, **told, "logprobs": None, **_ending(event)})

    def _delta(self, number: int, delta: Delta) -> str | None:
        if not delta.text and not delta.token_ids:
            return None
        # The hot path: what changes is put between what does not.
        token_ids = f',"token_ids":{list(delta.token_ids)}' if self._call.returns_token_ids else ""
        content = f"{self._before_text}{encode_basestring(delta.text)}{self._after_text}"
        return f'{self._before}{{"index":{number},{content}{token_ids}}}{self._after}'

    def _chunk(self, choice: dict[str, Any]) -> str:
        return f"{self._before}{_encode(choice)}{self._after}"

    def usage(self) -> str | None:
        """Gives the last chunk, with no choices, if it was asked for."""
        if not self._call.include_usage:
            return None
        return f'{self._before}],"usage":{_encode(self._tally.usage())}}}'


_UNFINISHED: dict[str, Any] = {"logprobs": None, "finish_reason": None}
