"""Declares the connection to the scheduler as the gateway's core needs it. `scheduler_link` has the real one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from blockyard.contract.scheduling import Abort, Add, Resume

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blockyard.contract.scheduling import Adapter, ModelFacts


Outgoing = Add | Resume | Abort


class Cancelled(NamedTuple):
    """The result of a cancel, by names: requests that ran, and those that the scheduler may yet hear of."""

    cancelled: Sequence[str] = ()
    pending: Sequence[str] = ()


class Link(Protocol):
    """Sends requests to the scheduler, and knows its model and whether it is ready."""

    @property
    def facts(self) -> ModelFacts | None:
        """What the scheduler said of its model last; None before it said anything."""
        ...

    @property
    def loras(self) -> Mapping[str, Adapter]:
        """The adapters that requests may have, by name, as the scheduler said last."""
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
        """If not ready: what is missing, for a person; else empty."""
        ...

    def send(self, item: Outgoing) -> None:
        """Sends an item, in one message with all that is sent in this turn of the loop."""
        ...

    async def cancel(self, request_ids: Sequence[str]) -> Cancelled:
        """Ends requests, whichever gateway reads them. Raises BlockyardError NO_READY_WORKER."""
        ...
