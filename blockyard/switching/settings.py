"""The settings that say which of several models are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from blockyard.settings import option


@dataclass(frozen=True, slots=True)
class SwitchingSettings:
    """How the models of one system take turns. A single model takes part if it is unloaded when idle."""

    max_loaded_models: Annotated[int, Field(ge=0)] = option(
        0,
        "models of a system with several that are loaded at a time; each gets an equal part of the memory; 0: as many "
        "as fit without cutting the length of any",
    )
    idle_unload_seconds: Annotated[float, Field(ge=0)] = option(
        0.0, "unload a model after so many seconds without a request, and load it again at the next one; 0: never"
    )
    model_turn_seconds: Annotated[float, Field(ge=0)] = option(
        30.0,
        "how long a busy model keeps its place while another one waits for it, in seconds; after that its new requests "
        "wait, and the ones under way have as long again before they wait too",
    )
