"""Formats log probabilities as the OpenAI API does, and a prompt's log probabilities as vLLM does.

A single token's text may contain U+FFFD for a part of a character. A chat also has the token's bytes, which are null
for a token that adds nothing to the text. The bytes of all tokens joined are the text, before a stop string cuts it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from blockyard.contract.events import TokenLogprob, TokenLogprobs
from gateway.request import raw_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


# Replaces minus infinity, which JSON lacks, as in vLLM.
MIN_LOGPROB = -9999.0


class TextOffsets:
    """Computes the offsets of tokens in a choice's text, in characters."""

    def __init__(self, num_characters: int = 0) -> None:
        self._num_characters = num_characters

    def add(self, raw: bytes) -> int:
        """Adds the next token's bytes and returns its offset. A token that begins within a character has its offset."""
        begins_within = bool(raw) and _continues(raw[0])
        offset = max(0, self._num_characters - begins_within)
        self._num_characters += sum(not _continues(byte) for byte in raw)
        return offset


def _continues(byte: int) -> bool:
    """Returns whether a byte of UTF-8 is not the first of its character."""
    return byte & 0xC0 == 0x80


def name_by_ids(entries: Iterable[TokenLogprobs]) -> list[TokenLogprobs]:
    """Names tokens by ids, as vLLM does for `return_tokens_as_token_ids`, since two tokens may have the same text."""
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
    """Returns the `logprobs` for the tokens of an echoed prompt. The first token has no log probability."""
    text, raw = first_token
    first = {"tokens": [text], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [offsets.add(raw)]}
    return join_rows(first, completion_logprobs(entries[1:], offsets))


def join_rows(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Appends the rows of the second `logprobs` to those of the first."""
    return {name: column + second[name] for name, column in first.items()}


def _by_text(chosen: TokenLogprob, top: Sequence[TokenLogprob]) -> dict[str, float]:
    logprobs: dict[str, float] = {}
    # If several tokens have the same text, keep the likeliest one, which comes first.
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
    """Returns vLLM's `prompt_logprobs`: for each token of the prompt, its own and the top entries by id.

    The first token has null.
    """
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
