"""Serves /tokenize and /detokenize in vLLM's form: the ids of a prompt or a chat, and the text of ids."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Request  # noqa: TC002 - FastAPI reads the annotations
from fastapi.responses import JSONResponse
from pydantic import Field

from blockyard.errors import BlockyardError
from gateway.fronts.http_calls.bodies import parse_body, read_json
from gateway.fronts.http_calls.body_types import Neutral, Shape
from gateway.fronts.openai import errors
from gateway.fronts.openai.schema.messages import ChatShape
from gateway.request import GenerationRequest

if TYPE_CHECKING:
    from gateway.generation import GenerationService

_MAX_INLINE_TOKENS = 2048
# The name, not a text: within one its quotes would be escaped.
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
    """Serves the tokenizer."""

    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation

    async def tokenize(self, request: Request) -> JSONResponse:
        """Turns a prompt or a chat into token ids, as a completion or a chat would."""
        raw = await read_json(request)
        body = parse_body(TokenizeChatBody if _MESSAGES.search(raw) else TokenizeBody, raw)
        self._generation.resolve_model(body.model or "")
        tokenizer = await self._generation.find_tokenizer(body.model or "")
        try:
            token_ids = await self._generation.prompt_of(replace(_prompt(body), model=body.model or ""))
        except BlockyardError as error:
            raise errors.rename(error, {}) from None
        models = self._generation.models()
        fields = {
            "count": len(token_ids),
            "max_model_len": models[0].max_model_len if models else None,
            "tokens": token_ids,
            "token_strs": tokenizer.pieces(token_ids) if body.return_token_strs else None,
        }
        return JSONResponse(fields)

    async def detokenize(self, request: Request) -> JSONResponse:
        """Turns token ids into text, special tokens too."""
        body = parse_body(DetokenizeBody, await read_json(request))
        self._generation.resolve_model(body.model or "")
        decode = (await self._generation.find_tokenizer(body.model or "")).decode
        if len(body.tokens) > _MAX_INLINE_TOKENS:
            text = await asyncio.to_thread(decode, body.tokens, skip_special_tokens=False)
        else:
            text = decode(body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})


def _prompt(body: TokenizeBody | TokenizeChatBody) -> GenerationRequest:
    if isinstance(body, TokenizeChatBody):
        return GenerationRequest(body.conversation())
    return GenerationRequest(body.prompt, add_special_tokens=body.add_special_tokens is not False)
