"""What the Python processes of Blockyard share, and all that a Python user imports."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from blockyard.extras import explained

if TYPE_CHECKING:
    from blockyard.async_client import AsyncClient, AsyncStream
    from blockyard.chat import Message, Role, Tool, ToolCall, ToolChoice
    from blockyard.client import Client, Stream
    from blockyard.client_access import ClientTls
    from blockyard.errors import BlockyardError, Reason, Violation
    from blockyard.llm import LLM
    from blockyard.results import (
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
    from blockyard.retry import RetryPolicy

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
    "blockyard.async_client": ("AsyncClient", "AsyncStream"),
    "blockyard.chat": ("Message", "Role", "Tool", "ToolCall", "ToolChoice"),
    "blockyard.client": ("Client", "Stream"),
    "blockyard.client_access": ("ClientTls",),
    "blockyard.errors": ("BlockyardError", "Reason", "Violation"),
    "blockyard.llm": ("LLM",),
    "blockyard.results": (
        *("Accepted", "BeamSearch", "Choice", "Completion", "Delta", "EarlyStopping", "Event", "FinishReason"),
        *("Finished", "Model", "PromptLogprobs", "Recovered", "TokenLogprob", "TokenLogprobs", "Usage"),
    ),
    "blockyard.retry": ("RetryPolicy",),
}
_HOMES = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    # Loaded on first use: a worker imports this package and has no need of a client.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with explained(f"blockyard.{name}", "serve"):
        return getattr(import_module(_HOMES[name]), name)
