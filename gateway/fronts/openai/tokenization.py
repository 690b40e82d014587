"""Serves /tokenize and /detokenize in vLLM's form: a prompt or a chat to token ids, and token ids to text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from blockyard.errors import BlockyardError
from gateway.fronts.http_calls.bodies import parse_body, read_json, read_tenant
from gateway.fronts.http_calls.body_types import Neutral, Shape
from gateway.fronts.openai import errors
from gateway.fronts.openai.schema.messages import ChatShape
from gateway.request import GenerationRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gateway.generation import GenerationService

# The number of tokens that are encoded in one call.
_BATCH = 4096
# Finds the key `messages`. It cannot match inside a string, where the quotes would be escaped.
_MESSAGES = re.compile(rb'"messages"\s*:')


class TokenizeBody(Shape):
    """The body of /tokenize for a prompt."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(ChatShape):
    """The body of /tokenize for a chat."""

    model: str | None = None
    add_special_tokens: Annotated[Any, Neutral(False)] = None
    return_token_strs: bool | None = None


class DetokenizeBody(Shape):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(fail_fast=True)]


class Tokenization:
    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation

    async def tokenize(self, request: Request) -> Response:
        """Turns a prompt or a chat into token ids, exactly as for generation."""
        tenant, raw = read_tenant(request), await read_json(request)
        body = parse_body(TokenizeChatBody if _MESSAGES.search(raw) else TokenizeBody, raw)
        model = body.model or ""
        self._generation.resolve_model(model)
        tokenizer = await self._generation.find_tokenizer(model)
        try:
            token_ids = await self._generation.prompt_of(replace(_prompt(body), model=model, tenant=tenant))
        except BlockyardError as error:
            raise errors.rename(error, {}) from None
        facts, has_pieces = self._generation.model_of(model).link.facts, bool(body.return_token_strs)
        max_model_len = facts.max_model_len if facts else None

        def write() -> bytes:
            pieces = [tokenizer.piece(token_id) for token_id in token_ids] if has_pieces else None
            return b"".join(_write_tokens(token_ids, max_model_len, pieces))

        content = await self._generation.run(write, tenant, len(token_ids) * (8 if has_pieces else 1))
        return Response(content, media_type="application/json")

    async def detokenize(self, request: Request) -> JSONResponse:
        """Turns token ids into text, including special tokens."""
        tenant, body = read_tenant(request), parse_body(DetokenizeBody, await read_json(request))
        name = body.model or ""
        self._generation.resolve_model(name)
        try:
            text = await self._generation.model_of(name).text_of(body.tokens, name, tenant, skip_special_tokens=False)
        except BlockyardError as error:
            raise errors.rename(error, {"prompt": "tokens"}) from None
        return JSONResponse({"prompt": text})


def _write_tokens(token_ids: Sequence[int], max_model_len: int | None, pieces: list[str] | None) -> Iterator[bytes]:
    """Yields the JSON of an answer in parts: encoding it in a single call would block all other calls."""
    yield f'{{"count":{len(token_ids)},"max_model_len":{json.dumps(max_model_len)},"tokens":['.encode()
    yield from _write_items(token_ids)
    yield b'],"token_strs":'
    if pieces is None:
        yield b"null"
    else:
        yield from (b"[", *_write_items(pieces), b"]")
    yield b"}"


def _write_items(items: Sequence[int] | Sequence[str]) -> Iterator[bytes]:
    for start in range(0, len(items), _BATCH):
        batch = json.dumps(list(items[start : start + _BATCH]), ensure_ascii=False, separators=(",", ":"))
        yield (b"," if start else b"") + batch[1:-1].encode()


def _prompt(body: TokenizeBody | TokenizeChatBody) -> GenerationRequest:
    if isinstance(body, TokenizeChatBody):
        return GenerationRequest(body.conversation())
    return GenerationRequest(body.prompt, add_special_tokens=body.add_special_tokens is not False)
