"""Decides whether requests can be sent to a scheduler. Knows no connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.contract.scheduling import Readiness
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from blockyard.contract.scheduling import ModelFacts, Progress

log = EventLogger(__name__)


class SchedulerReadiness:
    """Decides whether requests can be sent, from the scheduler's readiness and from both sides' models.

    Args:
        model_digest: SHA-256 of this gateway's config.json, in hex.
        reason: the reason why no scheduler is attached yet, in words.

    Attributes:
        facts: the latest facts about the scheduler's model; kept when the connection is lost.
    """

    def __init__(self, model_digest: str, reason: str) -> None:
        self.facts: ModelFacts | None = None
        self._model_digest = model_digest
        # Whether the open stream has brought facts.
        self._has_facts = False
        self._readiness = Readiness(False, reason)
        self._logged = (False, "")

    @property
    def is_ready(self) -> bool:
        """Whether requests would be computed now. May be read from any thread."""
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
        """Why the scheduler is not ready, for a person; empty if it is."""
        if self.has_other_model and self.facts is not None:
            return (
                "the gateway and the scheduler have different models, give both one --model: the SHA-256 of "
                f"config.json is {self._model_digest[:12]} here and {self.facts.model_digest[:12]} there"
            )
        if self.is_ready:
            return ""
        return self._readiness.message or "the scheduler has not sent its model's facts yet"

    @property
    def needs_repair(self) -> bool:
        """Whether the scheduler is not ready and waiting does not help: somebody has to repair what `message` names."""
        return self.has_other_model or self._readiness.needs_repair

    def _apply(self, progress: Progress) -> bool:
        """Applies a message's facts and readiness; returns whether the message has either."""
        if progress.facts is not None:
            self.facts, self._has_facts = progress.facts, True
        if progress.readiness is not None:
            self._readiness = progress.readiness
        is_news = progress.facts is not None or progress.readiness is not None
        if is_news:
            self._log()
        return is_news

    def _log(self) -> None:
        """Logs the readiness if it has changed. The scheduler repeats it whenever a replica comes or goes."""
        readiness = (self.is_ready, self.message)
        if readiness != self._logged:
            self._logged = readiness
            log.info("readiness", ready=readiness[0], message=readiness[1] or None)

    def _detach(self, reason: str) -> None:
        """Marks the scheduler as detached. `reason`: the cause, in words."""
        self._has_facts = False
        self._readiness = Readiness(False, reason)
        self._logged = (False, "")
