"""Serves /tokenize and /detokenize in vLLM's form: a prompt or the body of a call to ids, and ids to text."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field

from blockyard.errors import BlockyardError
from gateway.fronts.http_calls.bodies import parse_body, read_json, read_tenant
from gateway.fronts.http_calls.body_types import Shape
from gateway.fronts.openai import errors
from gateway.fronts.openai.call_spec import understand_chat
from gateway.fronts.openai.schema.requests import ChatBody
from gateway.request import GenerationRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from contextlib import AbstractContextManager

    from gateway.generation import GenerationService

# The number of tokens that are encoded in one call.
_BATCH = 4096


class TokenizeBody(Shape):
    """The body of /tokenize for a prompt."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(ChatBody):
    """The body of /tokenize for a chat: any body of /v1/chat/completions."""

    return_token_strs: bool | None = None


class DetokenizeBody(Shape):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(fail_fast=True)]


class TokenForm(NamedTuple):
    """A form of the bodies of /tokenize.

    Attributes:
        key: the parameter that only bodies of this form have.
        body: the type of the bodies, with fields `model` and `return_token_strs`.
        understand: makes the request whose prompt is tokenized.
        naming: returns a context that renames the errors of the core to the parameters of a body.
    """

    key: str
    body: type[Shape]
    understand: Callable[[Any], GenerationRequest]
    naming: Callable[[Any], AbstractContextManager[None]]


class _Keys(Shape):
    """The keys by which the forms of bodies are known."""

    model_config = ConfigDict(extra="ignore")

    prompt: Any = None
    messages: Any = None
    input: Any = None


def _form_of(raw: bytes, forms: Sequence[TokenForm]) -> TokenForm:
    """Returns the form of a body, by default the last one."""
    # A key cannot match inside a string, where the quotes would be escaped.
    found = [form for form in forms if re.search(rf'"{form.key}"\s*:'.encode(), raw)]
    if len(found) > 1:
        # A tool's schema may have such a key, too.
        keys = parse_body(_Keys, raw).model_fields_set
        found = [form for form in found if form.key in keys]
    return found[0] if found else forms[-1]


class Tokenization:
    """Turns the prompts of bodies into token ids. `forms`: further forms of bodies, of other APIs."""

    def __init__(self, generation: GenerationService, forms: Sequence[TokenForm] = ()) -> None:
        self._generation = generation
        self.forms = (_CHAT, *forms, _PROMPT)

    async def tokenize(self, request: Request) -> Response:
        """Turns a prompt, or the body of a call, into token ids, exactly as for generation."""
        tenant, raw = read_tenant(request), await read_json(request)
        return await tokenize(self._generation, raw, tenant, _form_of(raw, self.forms))

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


async def tokenize(generation: GenerationService, raw: bytes, tenant: str, form: TokenForm) -> Response:
    """Answers /tokenize for a body; raises BlockyardError."""
    body: Any = parse_body(form.body, raw)
    model = body.model or ""
    generation.resolve_model(model)
    tokenizer = await generation.find_tokenizer(model)
    with form.naming(body):
        token_ids = await generation.prompt_of(replace(form.understand(body), model=model, tenant=tenant))
    facts, has_pieces = generation.model_of(model).link.facts, bool(body.return_token_strs)
    max_model_len = facts.max_model_len if facts else None

    def write() -> bytes:
        pieces = [tokenizer.piece(token_id) for token_id in token_ids] if has_pieces else None
        return b"".join(_write_tokens(token_ids, max_model_len, pieces))

    content = await generation.run(write, tenant, len(token_ids) * (8 if has_pieces else 1))
    return Response(content, media_type="application/json")


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


def _understand_prompt(body: TokenizeBody) -> GenerationRequest:
    return GenerationRequest(body.prompt, add_special_tokens=body.add_special_tokens is not False)


def _understand_chat(body: TokenizeChatBody) -> GenerationRequest:
    return understand_chat(body).requests[0]


@contextmanager
def _naming(_body: Any) -> Generator[None]:
    try:
        yield
    except BlockyardError as error:
        raise errors.rename(error, {}) from None


_CHAT = TokenForm("messages", TokenizeChatBody, _understand_chat, _naming)
_PROMPT = TokenForm("prompt", TokenizeBody, _understand_prompt, _naming)
