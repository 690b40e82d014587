"""What the Python processes of Blockyard share, and all that a Python user imports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockyard.client import AsyncClient, Client
    from blockyard.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncClient", "Client", "__version__"]

_HOMES = {"Client": "blockyard.client", "AsyncClient": "blockyard.client", "LLM": "blockyard.llm"}


def __getattr__(name: str) -> Any:
    # Loaded on first use: a worker imports this package and has no need of a client.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(_HOMES[name]), name)
