"""One request's life, for both fronts: validated, tokenized, sent to the scheduler, detokenized, ended.

Owns the live requests of this process. Knows neither messages nor HTTP: both fronts hand it a GenerationRequest and
read events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.request import Event, GenerationRequest
    from gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that is served."""

    name: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool
    determinism_id: str
    batch_invariant: bool


class Generation:
    """One request's events, read by `async for`: Accepted first, then Delta and one Finished for each sequence.

    Reading raises BlockyardError when the request fails or is cancelled (CLIENT_CANCELLED). A front that answers with
    a status line awaits Accepted first (`await anext(generation)`), since the scheduler may refuse the request.
    Whoever started it calls `aclose`, always.
    """

    request_id: str

    def __aiter__(self) -> Generation:
        """Is its own iterator."""
        return self

    async def __anext__(self) -> Event:
        """Waits for the next event."""
        raise StopAsyncIteration

    def close(self) -> None:
        """Ends it: aborts what still runs. Idempotent; for callbacks."""

    async def aclose(self) -> None:
        """Ends it: aborts what still runs (the client is gone). Idempotent."""


class GenerationService:
    """Starts requests and knows those that run. One for each process, used by both fronts."""

    tokenizer: Tokenizer
    model_name: str
    readiness_message: str

    async def start(self, request: GenerationRequest) -> Generation:
        """Validates, tokenizes and submits a request; raises BlockyardError with every violation."""
        return Generation()

    def cancel(self, request_ids: Iterable[str]) -> list[str]:
        """Ends requests by id with CLIENT_CANCELLED, and returns those that were running."""
        return list(request_ids)

    def is_ready(self) -> bool:
        """Whether requests can be served now; `readiness_message` says why not."""
        return False

    def models(self) -> list[ModelCard]:
        """Lists the models: one, or none while the scheduler has not told its facts."""
        return []

    def resolve_model(self, name: str) -> None:
        """Raises BlockyardError MODEL_NOT_FOUND unless the name is empty or the served model's."""
