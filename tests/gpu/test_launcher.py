"""Steps launched ahead on the device: what they return, in which order, and whether the host waits."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from blockyard_kernels.launching import IMMEDIATE, CudaLauncher, Launcher, upload

pytestmark = pytest.mark.gpu

SIZE = 4096
REPEATS = 50


@pytest.fixture
def launcher(device: torch.device) -> Launcher:
    return CudaLauncher(device) if device.type == "cuda" else IMMEDIATE


def test_results_come_in_order(launcher: Launcher, device: torch.device) -> None:
    table = torch.zeros(4, dtype=torch.int64, device=device)

    def add(number: int) -> tuple[torch.Tensor, ...]:
        table.add_(upload(np.full(4, number), device))
        return (table.clone(),)

    launched = [launcher.launch(lambda number=number: add(number)) for number in range(1, 9)]
    assert [each.wait()[0].tolist() for each in launched] == [[sum(range(n + 1))] * 4 for n in range(1, 9)]
    assert all(each.is_ready for each in launched)


def test_the_host_does_not_wait_for_what_it_launches(launcher: Launcher, device: torch.device) -> None:
    if device.type != "cuda":
        return
    rows = torch.randn(SIZE, SIZE, device=device)

    def work() -> tuple[torch.Tensor, ...]:
        inputs, product = upload(np.arange(3), device), rows
        for _ in range(REPEATS):
            product = product @ rows * 1e-2
        return (inputs + 1, product[0, :1])

    launcher.launch(work).wait()
    begin = time.perf_counter()
    launched = [launcher.launch(work) for _ in range(2)]
    enqueued = time.perf_counter() - begin
    assert not launched[1].is_ready
    assert launched[1].wait()[0].tolist() == [1, 2, 3]
    assert enqueued < time.perf_counter() - begin
