"""Selects the log probabilities of an answer's text from those of all its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.fronts.openai.logprobs import chat_logprobs

if TYPE_CHECKING:
    from blockyard.contract.events import Delta

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
