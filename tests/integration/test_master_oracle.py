"""Any way of running gives the answers of running alone: through the three real services, in bfloat16, to the bit."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import pytest

from blockyard import AsyncClient
from tests.kit.kernels.backends import BEST, REFERENCE, build_kernels
from tests.kit.kernels.tiny_adapters import make_tiny_adapter, make_tiny_prompt
from tests.kit.kernels.tiny_models import VOCAB_SIZE, tiny_model
from tests.kit.oracles import requests
from tests.kit.processes.status import scheduler_status
from tests.kit.processes.system import System

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from blockyard.inference.v1.inference_pb2 import GenerationSpec
    from tests.kit.oracles.requests import Answer

# Of 8 heads and 2 KV heads, so that four ranks hold each KV head twice.
MODEL = "qwen3"
COMMON = ("--dtype", "bfloat16", "--block-size", "16", "--max-model-len", "256", "--max-num-seqs", "64")
SOFT = "soft"
# What a round lacks, since requests met otherwise, comes in another one.
MAX_ROUNDS = 6
# By the number of a request modulo eight; more than there are slots.
ADAPTERS = {3: "a", 4: "b", 5: SOFT, 6: SOFT}
SWAPPED = ("num_swapped_out_blocks", "num_swapped_in_blocks")
# 32 requests with 64 sequences want about 450 blocks of 16 tokens.
FEW_BLOCKS = ("--num-device-blocks", "80", "--debug-integrity")


@dataclass(frozen=True)
class Way:
    """A way of running; `happens`: the counters that prove that it was run so.

    `predicts`: requests predict their answers, with lies among them, from which workers draft.
    """

    flags: tuple[str, ...] = ()
    happens: tuple[str, ...] = ()
    num_requests: int = 32
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    predicts: bool = False


# Swaps while the host has room, which is not for long. Left to choose, the scheduler goes by what it measures.
EVERYTHING = Way(
    (
        *("--num-device-blocks", "26", "--num-host-blocks", "6", "--preemption-mode", "swap"),
        *("--max-prefill-chunk", "16", "--debug-integrity"),
    ),
    (*SWAPPED, "num_recomputed_sequences"),
    num_requests=16,
)
DRAFTING = replace(
    EVERYTHING,
    flags=(*EVERYTHING.flags, "--speculation", "ngram", "--max-draft-tokens", "5"),
    happens=(*EVERYTHING.happens, "num_accepted_tokens"),
    predicts=True,
    tensor_parallel_size=2,
)
# Of two that follow each other `make test` has one; all of what can happen is in those: see tests/kit/cut.py.
WAYS = {
    "batched": Way(happens=("num_cached_tokens",)),
    "swapping": Way((*FEW_BLOCKS, "--num-host-blocks", "500", "--preemption-mode", "swap"), SWAPPED),
    "recomputing": Way(
        (*FEW_BLOCKS, "--num-host-blocks", "0", "--preemption-mode", "recompute"), ("num_recomputed_sequences",)
    ),
    "chunked": Way(("--max-prefill-chunk", "16"), ("num_cached_tokens",)),
    "everything": EVERYTHING,
    "everything on 2 ranks": replace(EVERYTHING, tensor_parallel_size=2),
    "drafting": Way(("--speculation", "auto"), ("num_accepted_tokens",), predicts=True),
    # Each of the eight kinds of requests once: four processes that wait for each other on two cores take long.
    "everything in 2 stages of 2 ranks": replace(
        EVERYTHING, tensor_parallel_size=2, pipeline_parallel_size=2, num_requests=8
    ),
    "everything and drafting on 2 ranks": DRAFTING,
    "everything on 4 ranks": replace(EVERYTHING, tensor_parallel_size=4, num_requests=8),
    "everything in 2 stages": replace(EVERYTHING, pipeline_parallel_size=2),
}
# A process, a thread.
OURS = ("--cpu-kernels", BEST, "--num-threads", "1")
TORCHS = ("--cpu-kernels", REFERENCE, "--num-threads", "1")


@cache
def adapters() -> Path:
    """Returns a folder with adapters of the model, one of them a soft prompt, made once."""
    root = tiny_model(MODEL).parent / "adapters-of-the-oracle"
    for seed, name in enumerate(sorted(set(ADAPTERS.values()))):
        make = make_tiny_prompt if name == SOFT else make_tiny_adapter
        make(root / name, tiny_model(MODEL), seed)
    return root


def make_specs(count: int = 32) -> list[GenerationSpec]:
    """Makes requests, half of them with an adapter."""
    specs = requests.make_specs(VOCAB_SIZE, count)
    for number, spec in enumerate(specs):
        spec.model = ADAPTERS.get(number % 8, "")
    return specs


def predict(specs: Sequence[GenerationSpec], alone: Sequence[Answer]) -> None:
    """Has requests predict their answers. A fifth of the tokens is wrong: ends, ids of the padding, and any."""
    chooser = random.Random(1)
    for spec, answer in zip(specs, alone, strict=True):
        for token_id in answer.choices[0].token_ids:
            lie = chooser.choice([0, 1, chooser.randrange(VOCAB_SIZE)])
            spec.sampling.predicted_token_ids.append(lie if chooser.random() < 0.2 else token_id)


def start(folder: Path, flags: Sequence[str], worker_flags: Sequence[str], **sizes: int) -> System:
    """Makes a system with the adapters."""
    modules = ",".join(f"{name}={name}" for name in sorted(set(ADAPTERS.values())))
    slots = (
        "--max-loras",
        "2",
        "--max-prompt-adapter-tokens",
        "6",
        "--lora-root",
        str(adapters()),
        "--lora-modules",
        modules,
    )
    patience = ("--lora-patience-seconds", "0.1")
    worker_flags = [*worker_flags, "--worker-lora-root", str(adapters())]
    return System(tiny_model(MODEL), folder, [*COMMON, *slots, *patience, *flags], worker_flags, **sizes)


async def run(target: str, specs: list[GenerationSpec], *, concurrent: bool) -> list[Answer]:
    """Runs requests once the adapters are listed."""
    async with AsyncClient(target) as client:
        while len(await client.list_models()) <= len(set(ADAPTERS.values())):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return await requests.run(target, specs, concurrent=concurrent)


def run_alone(folder: Path, specs: list[GenerationSpec], worker_flags: Sequence[str]) -> list[Answer]:
    """The truth: each request by itself, nothing cached."""
    with start(folder, ["--no-enable-prefix-caching"], worker_flags) as system:
        answers = asyncio.run(run(system.grpc_target, specs, concurrent=False))
        status = scheduler_status(system)
    assert status.num_preemptions == 0
    assert status.num_cached_tokens == 0
    choices = [choice for answer in answers for choice in answer.choices]
    assert len({choice.token_ids for choice in choices}) > len(answers), "the requests are too alike"
    assert any(isinstance(choice.matched_stop, str) for choice in choices)
    assert any(choice.score is not None for choice in choices)
    assert any(choice.logprobs for choice in choices)
    assert any(answer.prompt_logprobs for answer in answers)
    return answers


def assert_same(answers: list[Answer], alone: list[Answer]) -> None:
    for number, (answer, truth) in enumerate(zip(answers, alone, strict=True)):
        assert _without_counts(answer) == truth, f"request {number}"


def _without_counts(answer: Answer) -> Answer:
    """Leaves out what became of predictions, which counts work and depends on the load."""
    choices = (replace(each, usage=replace(each.usage, prediction=None)) for each in answer.choices)
    return replace(answer, choices=tuple(choices))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    build_kernels()
    return run_alone(tmp_path_factory.mktemp("alone"), make_specs(), OURS)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_any_way_gives_the_answers_of_running_alone(way: Way, alone: list[Answer], tmp_path: Path) -> None:
    sizes = {"tensor_parallel_size": way.tensor_parallel_size, "pipeline_parallel_size": way.pipeline_parallel_size}
    happens = ("num_copied_blocks", *way.happens)
    with start(tmp_path, way.flags, OURS, **sizes) as system:
        specs = make_specs(way.num_requests)
        if way.predicts:
            predict(specs, alone[: way.num_requests])
        for _ in range(MAX_ROUNDS):
            answers = asyncio.run(run(system.grpc_target, specs, concurrent=True))
            assert_same(answers, alone[: way.num_requests])
            status = scheduler_status(system).replicas[0]
            if all(getattr(status, counter) for counter in happens):
                break
    # The proof that it did happen.
    assert [worker.world_size for worker in status.workers] == [len(system.workers)] * len(system.workers)
    for counter in happens:
        assert getattr(status, counter) > 0, counter
    if "--max-prefill-chunk" in way.flags:
        assert status.num_prefill_pieces > 2 * way.num_requests
    assert status.device_blocks.num_free_blocks == status.device_blocks.num_blocks
    assert status.host_blocks.num_free_blocks == status.host_blocks.num_blocks


def test_the_reference_kernels_keep_the_promise_too(tmp_path: Path) -> None:
    specs = make_specs(8)
    alone = run_alone(tmp_path / "alone", specs, TORCHS)
    flags = ["--num-device-blocks", "30", "--num-host-blocks", "20", "--max-prefill-chunk", "16"]
    with start(tmp_path / "together", flags, TORCHS, tensor_parallel_size=2) as system:
        answers = asyncio.run(run(system.grpc_target, specs, concurrent=True))
        status = scheduler_status(system)
    assert_same(answers, alone)
    assert status.num_preemptions > 0
