"""Code that Blockyard's Python processes share, and the public names for Python users."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from blockyard.extras import naming_extra
from blockyard.version import __version__

if TYPE_CHECKING:
    from blockyard.client import (
        Accepted,
        AsyncClient,
        AsyncStream,
        BeamSearch,
        Choice,
        Classification,
        Classifications,
        Client,
        ClientTls,
        Completion,
        Delta,
        EarlyStopping,
        Embeddings,
        Event,
        Finished,
        FinishReason,
        Loading,
        Message,
        Model,
        PredictionUsage,
        PromptLogprobs,
        Recovered,
        RetryPolicy,
        Role,
        ScoredDocument,
        Scores,
        Stream,
        StructuredOutputsParams,
        TokenLogprob,
        TokenLogprobs,
        Tool,
        ToolCall,
        ToolCallDelta,
        ToolChoice,
        Usage,
        update_weights,
    )
    from blockyard.errors import BlockyardError, Reason, Violation
    from blockyard.local.llm import LLM
    from blockyard.lora.request import LoRARequest

__all__ = [
    "LLM",
    "Accepted",
    "AsyncClient",
    "AsyncStream",
    "BeamSearch",
    "BlockyardError",
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
    "LoRARequest",
    "Loading",
    "Message",
    "Model",
    "PredictionUsage",
    "PromptLogprobs",
    "Reason",
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
    "Violation",
    "__version__",
    "update_weights",
]

_HOMES = {
    "LLM": "blockyard.local.llm",
    "LoRARequest": "blockyard.lora.request",
    **dict.fromkeys(("BlockyardError", "Reason", "Violation"), "blockyard.errors"),
}


def __getattr__(name: str) -> Any:
    # Import on first use: a worker imports this package but needs no client.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with naming_extra(f"blockyard.{name}", "serve"):
        return getattr(import_module(_HOMES.get(name, "blockyard.client")), name)
