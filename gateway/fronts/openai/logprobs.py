"""Formats log probabilities as the OpenAI API does, and those of a prompt as vLLM does.

A token's text by itself may have U+FFFD for a part of a character; a chat has its bytes beside it, which are null for
a token that adds nothing to the text. The bytes of all tokens together are the text, but for what a stop cuts off.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from blockyard.contract.events import TokenLogprobs
from gateway.request import raw_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from blockyard.contract.events import TokenLogprob

# JSON has no infinity. vLLM's stand-in for it.
MIN_LOGPROB = -9999.0


class TextOffsets:
    """Counts where tokens begin in a choice's text, in characters."""

    def __init__(self, num_characters: int = 0) -> None:
        self._num_characters = num_characters

    def add(self, raw: bytes) -> int:
        """Adds the next token's bytes and returns where they begin; within a character, where that begins."""
        begins_within = bool(raw) and _continues(raw[0])
        offset = max(0, self._num_characters - begins_within)
        self._num_characters += sum(not _continues(byte) for byte in raw)
        return offset


def _continues(byte: int) -> bool:
    """Returns whether a byte of UTF-8 is not the first of its character."""
    return byte & 0xC0 == 0x80


def name_by_ids(entries: Iterable[TokenLogprobs]) -> list[TokenLogprobs]:
    """Names tokens by ids, as vLLM does for `return_tokens_as_token_ids`, since two may have one text."""
    return [TokenLogprobs(chosen and _named_by_id(chosen), tuple(map(_named_by_id, top))) for chosen, top in entries]


def _named_by_id(token: TokenLogprob) -> TokenLogprob:
    return replace(token, text=name_of(token.token_id))


def name_of(token_id: int) -> str:
    return f"token_id:{token_id}"


def completion_logprobs(entries: Iterable[TokenLogprobs], offsets: TextOffsets) -> dict[str, Any]:
    """Returns a completion's `logprobs`: a column for each property, a row for each token."""
    fields: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chosen, top in entries:
        assert chosen is not None
        fields["tokens"].append(chosen.text)
        fields["token_logprobs"].append(_finite(chosen.logprob))
        fields["top_logprobs"].append(_by_text(chosen, top))
        fields["text_offset"].append(offsets.add(raw_of(chosen)))
    return fields


def echo_logprobs(
    first_token: tuple[str, bytes], entries: Sequence[TokenLogprobs], offsets: TextOffsets
) -> dict[str, Any]:
    """Returns the same for the tokens of a prompt, of which the first has no log probability."""
    text, raw = first_token
    first = {"tokens": [text], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [offsets.add(raw)]}
    return join_rows(first, completion_logprobs(entries[1:], offsets))


def join_rows(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Puts the rows of one `logprobs` behind those of another."""
    return {name: column + second[name] for name, column in first.items()}


def _by_text(chosen: TokenLogprob, top: Sequence[TokenLogprob]) -> dict[str, float]:
    logprobs: dict[str, float] = {}
    # If several tokens have one text, the likeliest counts, which comes first.
    for token in (*top, chosen):
        logprobs.setdefault(token.text, _finite(token.logprob))
    return logprobs


def chat_logprobs(entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for chosen, top in entries:
        assert chosen is not None
        content.append(_chat_token(chosen) | {"top_logprobs": [_chat_token(token) for token in top]})
    return {"content": content, "refusal": None}


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(raw_of(token)) or None}


def prompt_logprobs(entries: Iterable[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """Returns vLLM's `prompt_logprobs`: by id, the prompt's token first; null for the first token."""
    return [None if chosen is None else _by_id((chosen, *top)) for chosen, top in entries]


def _by_id(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    return {
        str(token.token_id): {
            "logprob": _finite(token.logprob),
            "rank": token.rank,
            "decoded_token": token.text,
        }
        for token in tokens
    }


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
