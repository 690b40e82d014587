"""Declares the connection to the scheduler as the gateway's core needs it. `scheduler_link` has the real one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from blockyard.contract.scheduling import Abort, Add, Resume

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blockyard.contract.scheduling import Adapter, ModelFacts


Outgoing = Add | Resume | Abort


class Cancelled(NamedTuple):
    """The result of a cancel, by name: requests that ran, and those that a gateway may still send to the scheduler."""

    cancelled: Sequence[str] = ()
    pending: Sequence[str] = ()


class Link(Protocol):
    """Sends requests to the scheduler, and knows its model and whether it is ready."""

    @property
    def facts(self) -> ModelFacts | None:
        """The facts of the scheduler's model that came last; None before any have come."""
        ...

    @property
    def loras(self) -> Mapping[str, Adapter]:
        """The adapters that requests may have, by name, as the scheduler reported last."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether requests would be computed now."""
        ...

    @property
    def takes_requests(self) -> bool:
        """Whether requests can be sent; the scheduler lets them wait while no worker is ready."""
        ...

    @property
    def has_other_model(self) -> bool:
        """Whether the scheduler serves a model that is not this gateway's."""
        ...

    @property
    def message(self) -> str:
        """Why the scheduler is not ready, for a person; empty if it is."""
        ...

    def send(self, item: Outgoing) -> None:
        """Sends an item, in one message with all items of this turn of the event loop."""
        ...

    async def cancel(self, request_ids: Sequence[str]) -> Cancelled:
        """Ends requests, whichever gateway reads them. Raises BlockyardError NO_READY_WORKER."""
        ...
