"""The interface of the connection to the scheduler that the gateway's core uses; `scheduler_link` implements it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from blockyard.contract.scheduling import Abort, Adapter, Add, ModelFacts, Resume

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


Outgoing = Add | Resume | Abort


class Cancelled(NamedTuple):
    """The result of a cancel, as names of requests.

    `cancelled`: requests that were running. `pending`: requests that a gateway may still send to the scheduler.
    """

    cancelled: Sequence[str] = ()
    pending: Sequence[str] = ()


class Link(Protocol):
    """Sends requests to the scheduler, and knows its model and whether it is ready."""

    @property
    def facts(self) -> ModelFacts | None:
        """The latest facts about the scheduler's model; None before the first have arrived."""
        ...

    @property
    def loras(self) -> Mapping[str, Adapter]:
        """The adapters that requests may use, by name, as the scheduler last reported them."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether the scheduler would run requests now."""
        ...

    @property
    def takes_requests(self) -> bool:
        """Whether requests can be sent; while no worker is ready, they wait in the scheduler."""
        ...

    @property
    def has_other_model(self) -> bool:
        """Whether the scheduler serves a model that is not this gateway's."""
        ...

    @property
    def message(self) -> str:
        """The reason why the scheduler is not ready, in words; empty if it is ready."""
        ...

    def send(self, item: Outgoing) -> None:
        """Sends an item, in one message with all items of this turn of the event loop."""
        ...

    async def cancel(self, request_ids: Sequence[str]) -> Cancelled:
        """Cancels requests of any gateway. Raises BlockyardError NO_READY_WORKER."""
        ...
