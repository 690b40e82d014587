"""Steps: short ones are joined, and the results of several are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.text import encoding
from gateway.text.encoding import join_steps, run_all

if TYPE_CHECKING:
    import pytest


def test_short_steps_are_joined_and_results_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "SLICE_CHARACTERS", 100)

    def work(size: int) -> Any:
        yield size
        return size

    sizes = [40, 50, 60, 300, 10, 20]
    steps, told = join_steps(run_all(map(work, sizes))), []
    while True:
        try:
            told.append(next(steps))
        except StopIteration as stop:
            assert stop.value == sizes
            break
    # 40 and 50; 60; 300; 10 and 20.
    assert told == [100, 300, 100]
