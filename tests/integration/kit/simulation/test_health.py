"""The simulation notices services that lie about their health, and believes those that do not."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from gateway.generation import GenerationService
from tests.kit.simulation.asks import Ask
from tests.kit.simulation.cluster import Sizes
from tests.kit.simulation.health import Judgement
from tests.kit.simulation.play import play
from tests.kit.simulation.scenario import Fault, Scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kit.simulation.clients import Report

SECONDS = 30.0


@pytest.fixture(autouse=True)
def no_logs() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def play_partition(**sizes: bool) -> Report:
    """Plays a cluster whose scheduler nobody reaches for half a minute."""
    ask = Ask(number=0, at=0.5, client=0, prompt=(7, 8, 9), max_tokens=5)
    partition = Fault(1.0, "isolate", ("scheduler", "gateway-0"), SECONDS, 0.0)
    return play(Scenario("health", Sizes(**sizes), [ask], [partition]))


@pytest.mark.parametrize("is_slow", [False, True], ids=["short steps", "long steps"])
def test_health_that_is_true_is_believed(is_slow: bool) -> None:
    report = play_partition(is_slow=is_slow)
    assert report.violations == []
    for role in ("gateway", "scheduler"):
        assert report.health[role, Judgement.READY] and report.health[role, Judgement.NOT_READY]
        assert not report.health[role, Judgement.WRONG]


@pytest.mark.parametrize(("answer", "wrong"), [(True, "is ready, which"), (False, "is not ready, which")])
def test_health_that_is_not_true_is_found(monkeypatch: pytest.MonkeyPatch, answer: bool, wrong: str) -> None:
    monkeypatch.setattr(GenerationService, "is_ready", lambda *_: answer)
    assert wrong in play_partition().violations[0]
