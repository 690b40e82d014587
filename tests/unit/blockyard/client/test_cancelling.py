"""Cancelling in the background: nobody waits for it, and its thread does not outlive its owner."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING

from blockyard.client.cancelling import Canceller

if TYPE_CHECKING:
    import pytest


class Gateway:
    """Takes cancellations; answers none while it is frozen."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.came = threading.Event()
        self.thawed = threading.Event()
        self.thawed.set()
        self.thread: threading.Thread | None = None

    def cancel(self, request_ids: list[str], seconds: float) -> None:
        self.thread = threading.current_thread()
        self.came.set()
        if self.thawed.wait(60):
            self.cancelled.extend(request_ids)


def test_what_was_asked_for_is_done_before_it_stops() -> None:
    gateway = Gateway()
    canceller = Canceller(gateway.cancel)
    canceller.start()
    canceller.start()
    names = [f"r{number}" for number in range(20)]
    for name in names:
        canceller.cancel(name)
    canceller.stop()
    canceller.stop()
    assert gateway.cancelled == names
    assert gateway.thread is not None
    assert not gateway.thread.is_alive()


def test_it_starts_again() -> None:
    gateway = Gateway()
    canceller = Canceller(gateway.cancel)
    for name in ("first", "second"):
        canceller.start()
        canceller.cancel(name)
        canceller.stop()
    assert gateway.cancelled == ["first", "second"]


def test_one_that_was_never_started_stops_too() -> None:
    Canceller(Gateway().cancel).stop()


def test_a_frozen_gateway_holds_nobody_up() -> None:
    gateway = Gateway()
    gateway.thawed.clear()
    canceller = Canceller(gateway.cancel)
    canceller.start()
    canceller.cancel("r")
    assert gateway.came.wait(10)
    canceller.stop()
    assert gateway.thread is not None
    assert gateway.thread.is_alive(), "stop waited until the frozen gateway went on"
    gateway.thawed.set()
    gateway.thread.join(10)
    assert gateway.cancelled == ["r"]


def test_its_thread_ends_when_it_is_forgotten() -> None:
    gateway = Gateway()
    canceller = Canceller(gateway.cancel)
    canceller.start()
    canceller.cancel("r")
    assert gateway.came.wait(10)
    del canceller
    gc.collect()
    assert gateway.thread is not None
    gateway.thread.join(10)
    assert not gateway.thread.is_alive()


def test_one_that_fails_does_not_take_the_others_with_it(caplog: pytest.LogCaptureFixture) -> None:
    gateway = Gateway()

    def cancel(request_ids: list[str], seconds: float) -> None:
        if request_ids == ["bad"]:
            raise ValueError("a bug")
        gateway.cancel(request_ids, seconds)

    canceller = Canceller(cancel)
    canceller.start()
    for name in ("bad", "good"):
        canceller.cancel(name)
    canceller.stop()
    assert gateway.cancelled == ["good"]
    assert "a request was not cancelled" in caplog.text
