"""A host pool is registered as long as it is mapped, whoever holds it last; where it cannot be, the log says so."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from worker_service.device.registered import allocate_registered

if TYPE_CHECKING:
    import pytest

DEVICE = torch.device("cpu")


class FakeRegistry:
    """See `worker_service.device.registered.Registry`."""

    def __init__(self, error: str = "") -> None:
        self.held: dict[int, int] = {}
        self._error = error

    def register(self, address: int, num_bytes: int) -> str:
        if not self._error:
            self.held[address] = num_bytes
        return self._error

    def unregister(self, address: int) -> None:
        # A copy that is under way may write until now: the memory is mapped still.
        ctypes.memset(address, 1, self.held.pop(address))


def test_it_is_registered_until_the_last_view_is_gone() -> None:
    registry = FakeRegistry()
    memory = allocate_registered(5 << 20, DEVICE, registry)
    assert registry.held == {memory.data_ptr(): 5 << 20}
    assert not memory.any()
    view = memory.view(torch.float32)[7:]
    del memory
    assert registry.held
    view.fill_(1)
    del view
    assert not registry.held


def test_pools_one_after_another_are_each_registered() -> None:
    registry = FakeRegistry()
    for num_bytes in (1, 3 << 20, 1 << 22):
        memory = allocate_registered(num_bytes, DEVICE, registry)
        assert list(registry.held.values()) == [num_bytes]
        del memory


def test_memory_that_cannot_be_registered_serves_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    registry = FakeRegistry("out of memory")
    memory = allocate_registered(100, DEVICE, registry)
    memory.fill_(3)
    del memory
    record = caplog.records[-1]
    assert record.levelname == "WARNING"
    assert "swaps will be slow" in record.getMessage()
