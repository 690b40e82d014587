"""What the Python processes of Blockyard share, and all that a Python user imports."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from blockyard.extras import explained

if TYPE_CHECKING:
    from blockyard.client.access import ClientTls
    from blockyard.client.asynchronous import AsyncClient, AsyncStream
    from blockyard.client.chat import Message, Role, Tool, ToolCall, ToolChoice
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
        TokenLogprob,
        TokenLogprobs,
        Usage,
    )
    from blockyard.client.retry import RetryPolicy
    from blockyard.client.sync import Client, Stream
    from blockyard.errors import BlockyardError, Reason, Violation
    from blockyard.local.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Accepted",
    "AsyncClient",
    "AsyncStream",
    "BeamSearch",
    "BlockyardError",
    "Choice",
    "Client",
    "ClientTls",
    "Completion",
    "Delta",
    "EarlyStopping",
    "Event",
    "FinishReason",
    "Finished",
    "Message",
    "Model",
    "PromptLogprobs",
    "Reason",
    "Recovered",
    "RetryPolicy",
    "Role",
    "Stream",
    "TokenLogprob",
    "TokenLogprobs",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "Usage",
    "Violation",
    "__version__",
]

_NAMES_OF_MODULE = {
    "blockyard.client.asynchronous": ("AsyncClient", "AsyncStream"),
    "blockyard.client.chat": ("Message", "Role", "Tool", "ToolCall", "ToolChoice"),
    "blockyard.client.sync": ("Client", "Stream"),
    "blockyard.client.access": ("ClientTls",),
    "blockyard.errors": ("BlockyardError", "Reason", "Violation"),
    "blockyard.local.llm": ("LLM",),
    "blockyard.client.results": (
        *("Accepted", "BeamSearch", "Choice", "Completion", "Delta", "EarlyStopping", "Event", "FinishReason"),
        *("Finished", "Model", "PromptLogprobs", "Recovered", "TokenLogprob", "TokenLogprobs", "Usage"),
    ),
    "blockyard.client.retry": ("RetryPolicy",),
}
_HOMES = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    # Loaded on first use: a worker imports this package and has no need of a client.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with explained(f"blockyard.{name}", "serve"):
        return getattr(import_module(_HOMES[name]), name)
