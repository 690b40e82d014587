"""Finds the log probabilities of the tokens that a text consists of, among those of an answer's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.fronts.openai.logprobs import chat_logprobs

if TYPE_CHECKING:
    from blockyard.contract.events import Delta

Entry = dict[str, Any]


class TextLogprobs:
    """Holds those of tokens whose text has not come: a part of a character, or what may begin a marker.

    Tokens of reasoning, calls and markers are not text, and have no entries.
    """

    def __init__(self) -> None:
        self._waiting: list[Entry] = []

    def take(self, delta: Delta) -> list[Entry]:
        """Returns the entries of the tokens of a delta's text; keeps those whose text is to come."""
        if delta.reasoning_text or delta.tool_calls:
            # The waiting tokens became reasoning or calls.
            self._waiting = []
        if delta.logprobs:
            self._waiting += chat_logprobs(delta.logprobs)["content"]
        return self._cut_out(delta.text.encode()) if delta.text and self._waiting else []

    def _cut_out(self, text: bytes) -> list[Entry]:
        """Returns those of the text's tokens, and drops those before them."""
        begin = b"".join(bytes(entry["bytes"] or ()) for entry in self._waiting).rfind(text)
        if begin < 0:
            # The text has something else for bytes that are no character.
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
