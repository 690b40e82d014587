"""The client library. Imports no service: it needs only grpcio and protobuf."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockyard.client.access import ClientTls
    from blockyard.client.asynchronous import AsyncClient, AsyncStream
    from blockyard.client.results import Choice, Completion, StructuredOutputsParams
    from blockyard.client.retry import RetryPolicy
    from blockyard.client.sync import Client, Stream
    from blockyard.client.weights import update_weights
    from blockyard.contract.chat import Message, Role, Tool, ToolCall, ToolChoice
    from blockyard.contract.events import (
        Accepted,
        Delta,
        Event,
        Finished,
        Loading,
        PromptLogprobs,
        Recovered,
        TokenLogprob,
        TokenLogprobs,
        ToolCallDelta,
        Usage,
    )
    from blockyard.contract.models import Model
    from blockyard.contract.pooling import Classification, Classifications, Embeddings, ScoredDocument, Scores
    from blockyard.contract.sampling import BeamSearch, EarlyStopping, FinishReason, PredictionUsage

__all__ = [
    "Accepted",
    "AsyncClient",
    "AsyncStream",
    "BeamSearch",
    "Choice",
    "Classification",
    "Classifications",
    "Client",
    "ClientTls",
    "Completion",
    "Delta",
    "EarlyStopping",
    "Embeddings",
    "Event",
    "FinishReason",
    "Finished",
    "Loading",
    "Message",
    "Model",
    "PredictionUsage",
    "PromptLogprobs",
    "Recovered",
    "RetryPolicy",
    "Role",
    "ScoredDocument",
    "Scores",
    "Stream",
    "StructuredOutputsParams",
    "TokenLogprob",
    "TokenLogprobs",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "Usage",
    "update_weights",
]

_MODULES = {
    **dict.fromkeys(("AsyncClient", "AsyncStream"), "blockyard.client.asynchronous"),
    **dict.fromkeys(("Client", "Stream"), "blockyard.client.sync"),
    **dict.fromkeys(("Choice", "Completion", "StructuredOutputsParams"), "blockyard.client.results"),
    **dict.fromkeys(("Message", "Role", "Tool", "ToolCall", "ToolChoice"), "blockyard.contract.chat"),
    **dict.fromkeys(
        ("Classification", "Classifications", "Embeddings", "ScoredDocument", "Scores"),
        "blockyard.contract.pooling",
    ),
    **dict.fromkeys(("BeamSearch", "EarlyStopping", "FinishReason", "PredictionUsage"), "blockyard.contract.sampling"),
    "ClientTls": "blockyard.client.access",
    "Model": "blockyard.contract.models",
    "RetryPolicy": "blockyard.client.retry",
    "update_weights": "blockyard.client.weights",
}


def __getattr__(name: str) -> Any:
    # Import on first use: commands that only read a client's options open no connection.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "blockyard.contract.events")), name)
