"""Workers with a tiny model, over real sockets."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.kit.kernels.tiny_models import tiny_model
from tests.unit.worker_service.driver import WorkerDriver, running_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tensors this small are not worth a second thread."""
    torch.set_num_threads(1)


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A folder with a short name: a Unix socket's path must stay below 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="by") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def model() -> Path:
    """The folder of a tiny Llama."""
    return tiny_model("llama")


@pytest.fixture
async def fresh_worker(socket_folder: Path) -> AsyncIterator[WorkerDriver]:
    """A worker that was just started."""
    async with running_worker(socket_folder) as driver:
        yield driver


@pytest.fixture
async def worker(fresh_worker: WorkerDriver, model: Path) -> WorkerDriver:
    """A worker with a model and pools: 64 device blocks and 16 host blocks of 8 tokens."""
    await fresh_worker.prepare(model)
    return fresh_worker
