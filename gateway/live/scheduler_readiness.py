"""What the scheduler says of its model and of its readiness, compared with this gateway's model. Sends nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.contract.scheduling import Readiness
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from blockyard.contract.scheduling import ModelFacts, Progress

log = EventLogger(__name__)


class SchedulerReadiness:
    """Whether requests can be sent, and why not.

    Args:
        model_digest: of this gateway's model.
        reason: why nothing is attached yet.

    Attributes:
        facts: what the scheduler said of its model last; kept when the connection is lost.
    """

    def __init__(self, model_digest: str, reason: str) -> None:
        self.facts: ModelFacts | None = None
        self._model_digest = model_digest
        # Whether the facts came on the stream that is open.
        self._has_facts = False
        self._readiness = Readiness(False, reason)
        self._logged = (False, "")

    @property
    def is_ready(self) -> bool:
        """Whether requests would be computed now. May be called from any thread."""
        return self.takes_requests and self._readiness.ready

    @property
    def takes_requests(self) -> bool:
        """Whether requests can be sent: without a worker they wait in the scheduler."""
        return self._has_facts and not self.has_other_model

    @property
    def has_other_model(self) -> bool:
        """Whether the scheduler serves a model that is not this gateway's."""
        return self._has_facts and self.facts is not None and self.facts.model_digest != self._model_digest

    @property
    def message(self) -> str:
        """If not ready: what is missing, for a person; else empty."""
        if self.has_other_model and self.facts is not None:
            return (
                "the gateway and the scheduler have different models, give both one --model: the SHA-256 of "
                f"config.json is {self._model_digest[:12]} here and {self.facts.model_digest[:12]} there"
            )
        if self.is_ready:
            return ""
        return self._readiness.message or "the scheduler has not sent its model's facts yet"

    def on_progress(self, progress: Progress) -> bool:
        """Takes what a message says of the model and the readiness; returns whether it says anything."""
        if progress.facts is not None:
            self.facts, self._has_facts = progress.facts, True
        if progress.readiness is not None:
            self._readiness = progress.readiness
        is_news = progress.facts is not None or progress.readiness is not None
        if is_news:
            self._log()
        return is_news

    def _log(self) -> None:
        """Writes a line for a change: the scheduler repeats itself with each replica that comes or goes."""
        readiness = (self.is_ready, self.message)
        if readiness != self._logged:
            self._logged = readiness
            log.info("readiness", ready=readiness[0], message=readiness[1] or None)

    def on_detached(self, reason: str) -> None:
        """Takes note that the stream has ended, and why."""
        self._has_facts = False
        self._readiness = Readiness(False, reason)
        self._logged = (False, "")
