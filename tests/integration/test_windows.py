"""A model most of whose layers see a window of a few blocks: any way of running gives the answers of running alone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.kit.kernels.backends import BEST, REFERENCE, build_kernels
from tests.kit.kernels.tiny_models import VOCAB_SIZE, tiny_model
from tests.kit.oracles import requests
from tests.kit.processes.status import scheduler_status
from tests.kit.processes.system import System

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.kit.oracles.requests import Answer

NUM_REQUESTS = 16
COMMON = ("--dtype", "bfloat16", "--block-size", "16", "--max-model-len", "256", "--max-num-seqs", "64")
# Of six KV groups: some four sequences' blocks, and a few to swap.
EVERYTHING = (
    *("--num-device-blocks", "110", "--num-host-blocks", "24", "--preemption-mode", "swap"),
    *("--max-prefill-chunk", "16", "--debug-integrity"),
)
HAPPENS = (
    *("num_swapped_out_blocks", "num_swapped_in_blocks", "num_recomputed_sequences", "num_cached_tokens"),
    *("num_copied_blocks", "num_given_back_blocks"),
)
# What a round lacks, since requests met otherwise, comes in another one.
MAX_ROUNDS = 6


def start(folder: Path, flags: Sequence[str], kernels: str, **sizes: int) -> System:
    return System(
        tiny_model("gemma3"), folder, [*COMMON, *flags], ["--cpu-kernels", kernels, "--num-threads", "1"], **sizes
    )


def run_alone(folder: Path, kernels: str, count: int) -> list[Answer]:
    """The truth: each request by itself, nothing cached, its prompt in one piece, before anything is given back."""
    with start(folder, ["--no-enable-prefix-caching"], kernels) as system:
        specs = requests.make_specs(VOCAB_SIZE, count)
        answers = asyncio.run(requests.run(system.grpc_target, specs, concurrent=False))
        assert scheduler_status(system).num_preemptions == 0
    return answers


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    build_kernels()
    return run_alone(tmp_path_factory.mktemp("alone"), BEST, NUM_REQUESTS)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_blocks_are_given_back_and_answers_stay_as_they_are(
    num_stages: int, alone: list[Answer], tmp_path: Path
) -> None:
    with start(tmp_path, EVERYTHING, BEST, pipeline_parallel_size=num_stages) as system:
        specs = requests.make_specs(VOCAB_SIZE, NUM_REQUESTS)
        for _ in range(MAX_ROUNDS):
            answers = asyncio.run(requests.run(system.grpc_target, specs, concurrent=True))
            for number, (answer, truth) in enumerate(zip(answers, alone, strict=True)):
                assert answer == truth, f"request {number}"
            status = scheduler_status(system).replicas[0]
            if all(getattr(status, counter) for counter in HAPPENS):
                break
    for counter in HAPPENS:
        assert getattr(status, counter) > 0, counter
    assert status.device_blocks.num_free_blocks == status.device_blocks.num_blocks
    assert status.host_blocks.num_free_blocks == status.host_blocks.num_blocks


def test_the_reference_kernels_keep_the_promise_too(tmp_path: Path) -> None:
    alone = run_alone(tmp_path / "alone", REFERENCE, 4)
    with start(tmp_path / "together", EVERYTHING, REFERENCE) as system:
        specs = requests.make_specs(VOCAB_SIZE, 4)
        answers = asyncio.run(requests.run(system.grpc_target, specs, concurrent=True))
        status = scheduler_status(system).replicas[0]
    assert answers == alone
    assert status.num_given_back_blocks > 0
