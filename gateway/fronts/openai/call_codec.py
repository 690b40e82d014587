"""Encodes the state of an HTTP call as bytes that each of its requests carries, and decodes it."""

from __future__ import annotations

from dataclasses import asdict

from blockyard.gateway.v1 import state_pb2
from gateway.fronts.openai.call_state import CallState


def encode_state(state: CallState) -> bytes:
    return state_pb2.HttpCall(**asdict(state)).SerializeToString()


def decode_state(front_state: bytes, request_id: str) -> CallState:
    """Decodes the state of a request's call. A gRPC request has no state: over HTTP it is answered as a completion."""
    message = state_pb2.HttpCall.FromString(front_state)
    return CallState(
        call_id=message.call_id or request_id,
        is_chat=message.is_chat,
        created=message.created,
        include_usage=message.include_usage,
        num_requests=message.num_requests or 1,
        echo=message.echo,
        tells_prompt_logprobs=message.tells_prompt_logprobs,
        continuous_usage=message.continuous_usage,
        tokens_as_ids=message.tokens_as_ids,
        echo_text=message.echo_text,
        hides_reasoning=message.hides_reasoning,
        response=message.response,
    )
