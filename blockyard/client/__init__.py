"""The client library. Imports nothing of the services: it needs grpcio and protobuf alone."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockyard.client.access import ClientTls
    from blockyard.client.asynchronous import AsyncClient, AsyncStream
    from blockyard.client.chat import Message, Role, Tool, ToolChoice
    from blockyard.client.pooling import Classification, Classifications, Embeddings, ScoredDocument, Scores
    from blockyard.client.results import (
        Accepted,
        BeamSearch,
        Choice,
        Completion,
        Delta,
        EarlyStopping,
        Event,
        Finished,
        FinishReason,
        Model,
        PromptLogprobs,
        Recovered,
        StructuredOutputsParams,
        TokenLogprob,
        TokenLogprobs,
        ToolCall,
        ToolCallDelta,
        Usage,
    )
    from blockyard.client.retry import RetryPolicy
    from blockyard.client.sync import Client, Stream
    from blockyard.client.weights import update_weights

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
    "Message",
    "Model",
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
    **dict.fromkeys(("AsyncClient", "AsyncStream"), "asynchronous"),
    **dict.fromkeys(("Client", "Stream"), "sync"),
    **dict.fromkeys(("Message", "Role", "Tool", "ToolChoice"), "chat"),
    **dict.fromkeys(("Classification", "Classifications", "Embeddings", "ScoredDocument", "Scores"), "pooling"),
    "ClientTls": "access",
    "RetryPolicy": "retry",
    "update_weights": "weights",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use: the gateway reads the roles of chat messages and has no need of a client.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"blockyard.client.{_MODULES.get(name, 'results')}"), name)
