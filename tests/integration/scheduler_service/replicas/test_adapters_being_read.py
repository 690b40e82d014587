"""Adapters that a worker reads as its scheduler goes: its successor has all places of the worker's cache."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.kit.kernels.tiny_adapters import HeldAdapter, make_tiny_adapter, make_tiny_prompt
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.waiting import until
from tests.unit.worker_service.driver import running_worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from scheduler_service.config import SchedulerConfiguration
    from tests.unit.scheduler_service.conftest import Harness


@pytest.mark.parametrize("make", [make_tiny_adapter, make_tiny_prompt])
async def test_an_adapter_that_is_read_as_its_scheduler_ends_takes_no_place(
    harness: Harness, settings: Callable[..., SchedulerConfiguration], tmp_path: Path, make: Callable[..., Path]
) -> None:
    for seed, name in enumerate(("late", "next")):
        make(tmp_path / name, tiny_model("llama"), seed)
    room = {"max_loras": 1, "max_cpu_loras": 1, "max_prompt_adapter_tokens": 8, "lora_root": str(tmp_path)}
    sizes = {"num_device_blocks": 32, "num_host_blocks": 0, "dtype": "float32", "device": "cpu"}
    harness.configuration = settings(model=str(tiny_model("llama")), **room, **sizes)
    address = harness.configuration.service.worker_address
    driving = running_worker(tmp_path, worker_address=address, worker_lora_root=str(tmp_path))
    async with driving as worker:
        with HeldAdapter(tmp_path / "late") as held:
            async with harness.running_scheduler() as server:
                await until(lambda: bool(server.service.dispatcher.ready_engines))
                operator = await harness.operator()
                loading = asyncio.ensure_future(operator.load_lora("late", "late"))
                await held.wait_until_read()
            await asyncio.gather(loading, return_exceptions=True)
            async with harness.running_scheduler() as server:
                await until(lambda: bool(server.service.dispatcher.ready_engines))
                held.let_go()
                await operator.load_lora("next", "next")
        assert [lora.name for lora in (await worker.info()).lora.adapters] == ["next"]
