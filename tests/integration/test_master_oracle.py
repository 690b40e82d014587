"""Any way of running gives the tokens of running alone: through the three real services, in bfloat16, exactly."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.kit.kernels.backends import BEST, REFERENCE, build_kernels
from tests.kit.kernels.tiny_models import VOCAB_SIZE, tiny_model
from tests.kit.oracles.requests import Answer, make_specs, run
from tests.kit.processes.status import scheduler_status
from tests.kit.processes.system import System

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from blockyard.inference.v1.inference_pb2 import GenerationSpec

COMMON = ("--dtype", "bfloat16", "--block-size", "16", "--max-model-len", "256", "--max-num-seqs", "64")
FEW_BLOCKS = ("--num-device-blocks", "80", "--debug-integrity")
# 32 requests with 64 sequences want about 450 blocks of 16 tokens.
WAYS = {
    "batched": (),
    "swapping": (*FEW_BLOCKS, "--num-host-blocks", "500", "--preemption-mode", "swap"),
    "recomputing": (*FEW_BLOCKS, "--num-host-blocks", "0", "--preemption-mode", "recompute"),
    "chunked": ("--max-prefill-chunk", "16"),
    # Swaps while the host has room, which is not for long. Left to choose, the scheduler goes by what it measures.
    "everything": (
        *FEW_BLOCKS,
        *("--num-host-blocks", "8", "--preemption-mode", "swap"),
        *("--max-prefill-chunk", "16"),
    ),
}


OURS = ("--cpu-kernels", BEST)
TORCHS = ("--cpu-kernels", REFERENCE, "--num-threads", "1")


def run_alone(folder: Path, specs: list[GenerationSpec], worker_flags: Sequence[str]) -> list[Answer]:
    """The truth: each request by itself, nothing cached."""
    flags = [*COMMON, "--no-enable-prefix-caching"]
    with System(tiny_model("llama"), folder, flags, worker_flags) as system:
        answers = asyncio.run(run(system.grpc_target, specs, concurrent=False))
        status = scheduler_status(system)
    assert status.num_preemptions == 0
    assert status.num_cached_tokens == 0
    assert len({ids for answer in answers for ids in answer.token_ids}) > len(answers), "the requests are too alike"
    return answers


def assert_same(answers: list[Answer], alone: list[Answer]) -> None:
    for number, (answer, truth) in enumerate(zip(answers, alone, strict=True)):
        assert answer.token_ids == truth.token_ids, f"request {number}"
        assert answer.texts == truth.texts, f"request {number}"
        assert answer.reasons == truth.reasons, f"request {number}"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    build_kernels()
    return run_alone(tmp_path_factory.mktemp("alone"), make_specs(VOCAB_SIZE), OURS)


@pytest.mark.parametrize("way", WAYS)
def test_any_way_gives_the_tokens_of_running_alone(way: str, alone: list[Answer], tmp_path: Path) -> None:
    with System(tiny_model("llama"), tmp_path, [*COMMON, *WAYS[way]], OURS) as system:
        answers = asyncio.run(run(system.grpc_target, make_specs(VOCAB_SIZE), concurrent=True))
        status = scheduler_status(system)
        replica = status.replicas[0]
    assert_same(answers, alone)
    # The proof that it did happen.
    assert status.num_cached_tokens > 0
    assert replica.num_copied_blocks > 0
    if way in ("swapping", "everything"):
        assert replica.num_swapped_out_blocks > 0
        assert replica.num_swapped_in_blocks > 0
    if way in ("recomputing", "everything"):
        assert replica.num_recomputed_sequences > 0
    if way in ("chunked", "everything"):
        assert replica.num_prefill_pieces > 2 * len(answers)
    assert replica.device_blocks.num_free_blocks == replica.device_blocks.num_blocks
    assert replica.host_blocks.num_free_blocks == replica.host_blocks.num_blocks


def test_the_reference_kernels_keep_the_promise_too(tmp_path: Path) -> None:
    specs = make_specs(VOCAB_SIZE, count=8)
    alone = run_alone(tmp_path / "alone", specs, TORCHS)
    few_blocks = ("--num-device-blocks", "30", "--num-host-blocks", "20", "--max-prefill-chunk", "16")
    with System(tiny_model("llama"), tmp_path / "together", [*COMMON, *few_blocks], TORCHS) as system:
        answers = asyncio.run(run(system.grpc_target, specs, concurrent=True))
        status = scheduler_status(system)
    assert_same(answers, alone)
    assert status.num_preemptions > 0
