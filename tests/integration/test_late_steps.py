"""A worker whose device is late, behind the real services: the answers are those of one that computes at once.

Each step is computed when the host waits for it, and most are launched before the host knows the tokens of the step
before: see `tests.kit.kernels.late`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.integration.test_master_oracle import COMMON, MODEL, OURS, SWAPPED, assert_same
from tests.kit.kernels.backends import build_kernels
from tests.kit.kernels.tiny_models import VOCAB_SIZE, tiny_model
from tests.kit.oracles.requests import Answer, make_specs, run
from tests.kit.processes.scrape import Scrape
from tests.kit.processes.status import scheduler_status
from tests.kit.processes.system import System

if TYPE_CHECKING:
    from pathlib import Path

    from blockyard.inference.v1.inference_pb2 import GenerationSpec

FEW_BLOCKS = ("--num-device-blocks", "40", "--num-host-blocks", "10", "--preemption-mode", "swap", "--debug-integrity")
LATE_WORKER = "tests.kit.kernels.late_worker"


def never_waits(spec: GenerationSpec) -> bool:
    """Whether a request lets its steps be launched behind others."""
    waits = ("logprobs", "prompt_logprobs", "frequency_penalty")
    has_form = spec.HasField("beam_search") or spec.HasField("format")
    return not has_form and not any(map(spec.sampling.HasField, waits))


NEVER_WAIT = "requests that never wait"
SPECS = {
    "every kind of request": make_specs(VOCAB_SIZE, 8),
    NEVER_WAIT: [spec for spec in make_specs(VOCAB_SIZE, 24) if never_waits(spec)],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answer]]:
    """The truth: each request by itself, computed at once."""
    build_kernels()
    flags = [*COMMON, "--no-enable-prefix-caching"]
    with System(tiny_model(MODEL), tmp_path_factory.mktemp("alone"), flags, OURS) as system:
        return {name: asyncio.run(run(system.grpc_target, specs, concurrent=False)) for name, specs in SPECS.items()}


@pytest.mark.parametrize("kind", SPECS)
def test_a_late_device_gives_the_answers_of_running_alone(
    kind: str, alone: dict[str, list[Answer]], tmp_path: Path
) -> None:
    flags = [*COMMON, *FEW_BLOCKS, "--max-prefill-chunk", "16"]
    worker_flags = [*OURS, "--worker-metrics-port", "0"]
    with System(tiny_model(MODEL), tmp_path, flags, worker_flags, worker_module=LATE_WORKER) as system:
        answers = asyncio.run(run(system.grpc_target, SPECS[kind], concurrent=True))
        status = scheduler_status(system).replicas[0]
        port = system.services["worker"].wait_for_log(r"metrics_port=(\d+)").group(1)
        metrics = Scrape.get(f"127.0.0.1:{port}")
    assert_same(answers, alone[kind])
    late = metrics.sum("blockyard_worker_late_steps_total")
    # Of the others each may keep its steps from being late.
    assert late > 0 or kind != NEVER_WAIT
    for counter in SWAPPED:
        assert getattr(status, counter) > 0, counter
    assert status.device_blocks.num_free_blocks == status.device_blocks.num_blocks
