"""Makes the items of a response's output, and their events and log probabilities, from the parts of an answer."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from gateway.fronts.http_calls.parts import Part, PartKind
from gateway.fronts.openai.logprobs import chat_logprobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from blockyard.contract.events import Delta
    from gateway.fronts.responses.tools import FunctionName


Entry = dict[str, Any]


class TextLogprobs:
    """Keeps the log probabilities of tokens whose text is held back: parts of characters, or possible markers.

    Tokens of reasoning, calls and markers are not text; their entries are dropped.
    """

    def __init__(self) -> None:
        self._waiting: list[Entry] = []

    def take(self, delta: Delta) -> list[Entry]:
        """Returns the entries for a delta's text; keeps the entries of tokens whose text is still to come."""
        if delta.reasoning_text or delta.tool_calls:
            # The waiting tokens became reasoning or calls.
            self._waiting = []
        if delta.logprobs:
            self._waiting += chat_logprobs(delta.logprobs)["content"]
        return self._cut_out(delta.text.encode()) if delta.text and self._waiting else []

    def _cut_out(self, text: bytes) -> list[Entry]:
        """Returns the waiting entries of the text's tokens, and drops the entries before them."""
        begin = b"".join(bytes(entry["bytes"] or ()) for entry in self._waiting).rfind(text)
        if begin < 0:
            # The text has U+FFFD for bytes that are not UTF-8, so that the tokens' bytes do not match it.
            taken, self._waiting = self._waiting, []
            return taken
        taken, behind, place = list[Entry](), list[Entry](), 0
        for entry in self._waiting:
            size = len(entry["bytes"] or ())
            if place >= begin + len(text):
                behind.append(entry)
            elif place + size > begin:
                taken.append(entry)
            place += size
        self._waiting = behind
        return taken


_PREFIXES = {PartKind.REASONING: "rs", PartKind.TEXT: "msg", PartKind.CALL: "fc"}

Event = dict[str, Any]


class Output:
    """Makes the items of one response, and their events without sequence numbers.

    Args:
        response_id: the response's id, from which the ids of items are derived.
        names: the names of functions in namespaces, by their names for the model.
    """

    def __init__(self, response_id: str, names: Mapping[str, FunctionName]) -> None:
        self._names = names
        self._suffix = response_id.removeprefix("resp_")
        # The log probabilities of text parts, by the part's number.
        self._logprobs: defaultdict[int, list[Event]] = defaultdict(list)

    def open(self, part: Part) -> Iterator[Event]:
        yield {"type": "response.output_item.added", **_place(part), "item": self.item(part, "in_progress")}
        if part.kind is not PartKind.CALL:
            content = self._content(part)
            yield {"type": "response.content_part.added", **self._inside(part), "part": content}

    def grow(self, part: Part, piece: str, logprobs: list[Event]) -> Event:
        if part.kind is PartKind.CALL:
            return {"type": "response.function_call_arguments.delta", **self._of(part), "delta": piece}
        if part.kind is PartKind.REASONING:
            return {"type": "response.reasoning_text.delta", **self._inside(part), "delta": piece}
        self._logprobs[part.number] += logprobs
        return {"type": "response.output_text.delta", **self._inside(part), "delta": piece, "logprobs": logprobs}

    def close(self, part: Part, status: str) -> Iterator[Event]:
        if part.kind is PartKind.CALL:
            fields = {"name": self._name(part)["name"], "arguments": part.text}
            yield {"type": "response.function_call_arguments.done", **self._of(part), **fields}
        else:
            yield {**self._text_done(part), **self._inside(part), "text": part.text}
            yield {"type": "response.content_part.done", **self._inside(part), "part": self._content(part)}
        yield {"type": "response.output_item.done", **_place(part), "item": self.item(part, status)}

    def item(self, part: Part, status: str) -> dict[str, Any]:
        """Returns the item of a part. `status`: `in_progress` for a part that begins, `completed` or `incomplete`."""
        head = {"id": self._id(part), "status": status}
        if part.kind is PartKind.CALL:
            call = {"call_id": part.call_id, **self._name(part), "arguments": part.text}
            return {"type": "function_call", **head, **call}
        content = [] if status == "in_progress" else [self._content(part)]
        if part.kind is PartKind.REASONING:
            return {"type": "reasoning", **head, "summary": [], "content": content}
        return {"type": "message", **head, "role": "assistant", "content": content}

    def _text_done(self, part: Part) -> Event:
        if part.kind is PartKind.REASONING:
            return {"type": "response.reasoning_text.done"}
        return {"type": "response.output_text.done", "logprobs": self._logprobs[part.number]}

    def _content(self, part: Part) -> dict[str, Any]:
        if part.kind is PartKind.REASONING:
            return {"type": "reasoning_text", "text": part.text}
        logprobs = list(self._logprobs[part.number])
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": logprobs}

    def _name(self, part: Part) -> dict[str, str]:
        name = self._names.get(part.name)
        return {"name": part.name} if name is None else name._asdict()

    def _id(self, part: Part) -> str:
        return f"{_PREFIXES[part.kind]}_{self._suffix}_{part.number}"

    def _of(self, part: Part) -> dict[str, Any]:
        return {"item_id": self._id(part), **_place(part)}

    def _inside(self, part: Part) -> dict[str, Any]:
        return {**self._of(part), "content_index": 0}


def _place(part: Part) -> dict[str, Any]:
    return {"output_index": part.number}
