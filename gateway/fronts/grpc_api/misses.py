"""Answers AdminService.ListMisses: which prompts of a model were computed again, and why."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from blockyard.admin.v1 import admin_pb2
from blockyard.contract.codec.messages import encode_seconds
from gateway.live.prompt_history import find_misses
from gateway.request import client_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.live.prompt_history import Miss, PastPrompt
    from gateway.served_model import ServedModel

DEFAULT_MISSES = 100
# How many tokens are shown as text before the position where prompts part, and from there on.
_NUM_BEFORE, _NUM_AFTER = 16, 8


async def list_misses(
    model: ServedModel, request: admin_pb2.ListMissesRequest, *, shows_text: bool
) -> admin_pb2.ListMissesResponse:
    """Compares the last prompts of a model; raises BlockyardError NO_READY_WORKER before the model's facts are known.

    `shows_text`: whether the answer has the text at which prompts part.
    """
    now = asyncio.get_running_loop().time()
    prompts, block_size = model.live.history.prompts(now), model.facts().block_size

    def is_asked(prompt: PastPrompt) -> bool:
        submission = prompt.submission
        return request.tenant in ("", submission.tenant) and _name_of(prompt).startswith(request.request_id)

    # Prompts of other tenants are compared too: they may be the reason.
    misses = await asyncio.to_thread(find_misses, prompts, block_size)
    misses = [miss for miss in reversed(misses) if is_asked(miss.prompt)]
    asked = [prompt for prompt in prompts if is_asked(prompt)]
    answer = admin_pb2.ListMissesResponse(
        num_misses=len(misses),
        num_prompts=len(asked),
        num_prompt_tokens=sum(prompt.num_tokens for prompt in asked),
        num_cached_tokens=sum(prompt.num_cached_tokens for prompt in asked),
    )
    for miss in misses[: request.max_misses or DEFAULT_MISSES]:
        encoded = _encode(miss, now)
        if shows_text and miss.earlier is not None:
            await _add_text(encoded, miss, miss.earlier, model)
        answer.misses.append(encoded)
    return answer


def _encode(miss: Miss, now: float) -> admin_pb2.PromptMiss:
    return admin_pb2.PromptMiss(
        request=_encode_request(miss.prompt, now),
        cause=admin_pb2.MissCause.Value(f"MISS_CAUSE_{miss.cause.name}"),
        num_prompt_tokens=miss.prompt.num_tokens,
        num_cached_tokens=miss.prompt.num_cached_tokens,
        earlier=_encode_request(miss.earlier, now) if miss.earlier else None,
        num_common_tokens=miss.num_common_tokens,
    )


def _encode_request(prompt: PastPrompt, now: float) -> admin_pb2.PastRequest:
    return admin_pb2.PastRequest(
        request_id=_name_of(prompt), tenant=prompt.submission.tenant, age=encode_seconds(now - prompt.arrived_at)
    )


def _name_of(prompt: PastPrompt) -> str:
    """Returns a request's id as its client knows it."""
    return client_id(prompt.submission.tenant, prompt.submission.request_id)


async def _add_text(encoded: admin_pb2.PromptMiss, miss: Miss, earlier: PastPrompt, model: ServedModel) -> None:
    lora = miss.prompt.submission.lora
    tokenizer = await model.find_tokenizer(lora.name if lora else "")

    def decode(token_ids: Sequence[int], begin: int, end: int) -> str:
        return tokenizer.decode(token_ids[max(begin, 0) : end], skip_special_tokens=False)

    token_ids, position = miss.prompt.submission.prompt_token_ids, miss.num_common_tokens
    encoded.common_text = decode(token_ids, position - _NUM_BEFORE, position)
    encoded.text = decode(token_ids, position, position + _NUM_AFTER)
    encoded.earlier_text = decode(earlier.token_ids, position, position + _NUM_AFTER)
