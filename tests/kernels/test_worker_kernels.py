"""A worker's choice of CPU kernels: what it says of itself, and how a wrong choice is told over the wire."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from blockyard.common.v1 import status_pb2
from blockyard.errors import Reason
from blockyard.service.servers import internal_channel
from blockyard.worker.v1 import worker_pb2 as pb
from tests.kit.kernels.backends import INSTRUCTION_SETS, REFERENCE, build_kernels
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.processes.system import Service
from tests.unit.worker_service.driver import WorkerDriver, fails, new_sequence, running_worker

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = [5, 9, 14, 3, 77]


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A folder with a short name: a Unix socket's path must stay below 108 bytes."""
    build_kernels()
    with tempfile.TemporaryDirectory(prefix="by") as folder:
        yield Path(folder)


async def cache_of(folder: Path, cpu_kernels: str, dtype: int) -> pb.CacheInfo:
    async with running_worker(folder, cpu_kernels=cpu_kernels) as worker:
        cache = await worker.prepare(tiny_model("llama"), dtype)
        steps = worker.open(1)
        new = new_sequence(1, PROMPT, [1])
        assert len(await steps.sampled(new_sequences=[new], sequence_ids=[1], num_new_tokens=[len(PROMPT)])) == 1
        return cache


async def test_workers_of_different_kernels_promise_different_bits(socket_folder: Path) -> None:
    """Two of one kind promise the same, so that one may go on where the other died."""
    seen: list[str] = []
    for cpu_kernels in (*INSTRUCTION_SETS, REFERENCE):
        for dtype in (pb.DTYPE_FLOAT32, pb.DTYPE_BFLOAT16):
            cache = await cache_of(socket_folder, cpu_kernels, dtype)
            assert cache.batch_invariant
            seen.append(cache.determinism_id)
    assert len(set(seen)) == len(seen)
    best = (*INSTRUCTION_SETS, REFERENCE)[0]
    assert (await cache_of(socket_folder, best, pb.DTYPE_BFLOAT16)).determinism_id == seen[1]
    assert (await cache_of(socket_folder, "auto", pb.DTYPE_BFLOAT16)).determinism_id == seen[1]


async def test_kernels_that_are_not_there_are_told_to_who_loads_a_model(socket_folder: Path) -> None:
    """The worker lives on, and says what is wrong again."""
    environment = {"BLOCKYARD_KERNELS_DIR": str(socket_folder / "none")}
    flags = ["--worker-address", f"unix:{socket_folder}/w", "--worker-device", "cpu", "--cpu-kernels", "avx2"]
    service = Service("worker_service", flags, socket_folder / "log", environment)
    try:
        service.wait_for_log("listening")
        async with internal_channel(f"unix:{socket_folder}/w") as channel:
            worker = WorkerDriver(None, channel)  # type: ignore[arg-type]
            error = await fails(worker.load(tiny_model("llama")))
            assert error.reason is Reason.MODEL_NOT_LOADED
            assert error.message == "no kernels for avx2: this processor lacks it, or they were not built"
            assert (await worker.info()).state == status_pb2.WORKER_STATE_DEVICE_READY
    finally:
        assert service.stop() == 0
    assert "Traceback" not in service.log


@pytest.mark.parametrize("cpu_kernels", INSTRUCTION_SETS)
async def test_a_dtype_that_the_named_kernels_lack_is_refused(socket_folder: Path, cpu_kernels: str) -> None:
    async with running_worker(socket_folder, cpu_kernels=cpu_kernels) as worker:
        error = await fails(worker.load(tiny_model("llama"), pb.DTYPE_FLOAT16))
    assert error.reason is Reason.MODEL_NOT_LOADED
    assert error.message == f"the {cpu_kernels} kernels know no torch.float16"


async def test_left_to_choose_it_serves_any_dtype(socket_folder: Path) -> None:
    assert (await cache_of(socket_folder, "auto", pb.DTYPE_FLOAT16)).determinism_id
