"""Encodes the state of an HTTP call as bytes that each of its requests carries, and decodes it."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from blockyard.gateway.v1 import state_pb2
from gateway.fronts.openai.call_state import CallState


def encode_state(state: CallState) -> bytes:
    return state_pb2.HttpCall(**asdict(state)).SerializeToString()


def decode_state(front_state: bytes, request_id: str) -> CallState:
    """Decodes the state of a request's call. A gRPC request has no state: over HTTP it is answered as a completion."""
    message = state_pb2.HttpCall.FromString(front_state)
    values: dict[str, Any] = {each.name: getattr(message, each.name) for each in fields(CallState)}
    values |= {"call_id": message.call_id or request_id, "num_requests": message.num_requests or 1}
    return CallState(**values)
