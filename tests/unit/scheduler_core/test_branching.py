"""Beam search in the scheduler: forks that share blocks, beams that are dropped, preempted, lost and found again."""

from __future__ import annotations

import pytest

from scheduler_service.core.output import BeamSpec, EarlyStopping
from tests.unit.scheduler_core.harness import Bench, make_spec


@pytest.mark.parametrize("width", [2, 3, 8])
@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("prompt", [1, 4, 6])
def test_a_search_gives_what_it_gives_alone(width: int, early_stopping: EarlyStopping, prompt: int) -> None:
    bench = Bench()
    bench.add(make_spec("a", prompt, 12, n=width, stop={1, 2}, beams=BeamSpec(width, 0.7, early_stopping)))
    bench.run()
    bench.check_tokens()
    assert len(bench.finished) == width
