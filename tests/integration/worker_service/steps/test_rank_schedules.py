"""The master oracle over ranks that are threads: on any number of them requests get what each gets alone on one.

The scheduler's core makes the steps, with too few blocks for all: forks, beams, prefix hits, swaps, prompts in pieces
and sequences computed anew. Each rank has its share of the network, a pool and rows of its own.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from blockyard.common.v1.sampling_pb2 import SamplingParams
from blockyard.contract.parallel import ALONE, Parallel, ParallelSizes
from blockyard.contract.sampling import BeamSearch, EarlyStopping
from blockyard.worker.v1.worker_pb2 import ExecuteModelRequest
from scheduler_service.core.config import CoreConfig
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.values import GroupSpec, SchedulerStats
from scheduler_service.replicas.codec import decode_answer, encode_group_step
from scheduler_service.replicas.steps.answer_checks import AnswerLimits
from tests.kit.kernels.backends import BEST, REFERENCE, Kernels
from tests.kit.kernels.hostile_drafts import HostileDrafts
from tests.kit.kernels.ranks import new_backend
from tests.kit.kernels.tiny_models import VOCAB_SIZE, tiny_model
from tests.kit.oracles.core_requests import add_request
from tests.unit.worker_service.executor import BLOCK_SIZE, MAX_DRAFT_ROWS, MAX_DRAFT_TOKENS, make_executor
from tests.unit.worker_service.ranks_executor import RanksExecutor
from worker_service.codec import decode_step, encode_result
from worker_service.models import loader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from blockyard_kernels.drafting import DraftingOps
    from blockyard_kernels.ops import Backend
    from scheduler_service.core.sequence import Group
    from worker_service.models.loader import RunnableModel
    from worker_service.steps.rank_steps import RankSteps
    from worker_service.steps.step_executor import StepExecutor

NUM_REQUESTS = 12
NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS = 33, 8
MAX_LEN, MAX_SEQS = 96, 16
LIMITS = AnswerLimits(VOCAB_SIZE, MAX_LEN, MAX_SEQS, MAX_DRAFT_TOKENS, MAX_DRAFT_ROWS)
EPOCHS = itertools.count(1)
SIZES = [ParallelSizes(1, 1), ParallelSizes(2, 1), ParallelSizes(4, 1), ParallelSizes(1, 2), ParallelSizes(2, 2)]
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1, logprobs=0, prompt_logprobs=4),
    SamplingParams(seed=2, top_k=12, temperature=0.7),
    SamplingParams(seed=3, top_p=0.85, repetition_penalty=1.2, frequency_penalty=0.4),
    SamplingParams(seed=4, min_p=0.02, logit_bias={5: 2.0}, allowed_token_ids=range(0, 120, 3), logprobs=3),
    SamplingParams(
        temperature=0.0,
        logprobs=2,
        prompt_logprobs=0,
        presence_penalty=1.5,
        bad_token_sequences=[{"token_ids": (i, i % 7)} for i in range(200)],
    ),
    SamplingParams(seed=6, thinking_token_budget=3, thinking_tokens={"end_token_id": 9, "is_open": True}, logprobs=1),
    SamplingParams(seed=5, temperature=1.5, grammar="start: /([a-z]{1,3}[ ,]){99}/", logprobs=1),
]


@dataclass(frozen=True, slots=True)
class Network:
    """A model, and what computes it."""

    model: str
    kernels: Kernels
    quantization: str = "none"

    def make_executor(
        self, parallel: Parallel = ALONE, ranks: RankSteps | None = None, drafting: DraftingOps | None = None
    ) -> StepExecutor:
        """Makes the executor of a rank. Alone, its ops run one by one; else steps are replayed where they can be."""
        return make_executor(
            self._load(parallel),
            num_device_blocks=NUM_DEVICE_BLOCKS,
            num_host_blocks=NUM_HOST_BLOCKS,
            max_model_len=MAX_LEN,
            max_captured_tokens=0 if ranks is None or self.kernels.is_reference else 20,
            ranks=ranks,
            drafting=drafting,
        )

    def _load(self, parallel: Parallel) -> RunnableModel:
        """Loads a rank's share, with a backend of its own: in one process ranks would share it."""

        def own_backend(*_: object, **__: object) -> Backend:
            return new_backend(self.kernels, self.quantization)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loader, "get_backend", own_backend)
            device = torch.device("cpu")
            return loader.load_model(
                tiny_model(self.model), self.kernels.dtype, device, lambda done, total: None,
                quantization=self.quantization, parallel=parallel,
            )  # fmt: skip

    def __str__(self) -> str:
        return f"{self.model}-{self.kernels}-{self.quantization}"


NETWORKS = [
    Network("qwen3", Kernels(REFERENCE, torch.float32)),
    Network("llama_bias", Kernels(REFERENCE, torch.bfloat16)),
    Network("llama_bias", Kernels(BEST, torch.float32)),
    Network("qwen3", Kernels(BEST, torch.bfloat16)),
    Network("qwen3", Kernels(BEST, torch.bfloat16), "int8"),
]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request is told: ids, log probabilities, finish reason and score of each sequence, and of its prompt."""

    sequences: list[tuple[Any, ...]]
    prompt_logprobs: dict[int, Any]


def make_requests() -> Iterator[GroupSpec]:
    """Makes requests that share beginnings and differ in everything else."""
    chooser = random.Random(5)
    common = [chooser.randrange(VOCAB_SIZE) for _ in range(40)]
    for number in range(NUM_REQUESTS):
        own = [chooser.randrange(VOCAB_SIZE) for _ in range(chooser.choice((1, 7, 16, 30)))]
        sampling = SAMPLINGS[number % len(SAMPLINGS)]
        beams = BeamSearch(4, 0.5 + number / 8, list(EarlyStopping)[number // 4]) if number % 4 == 2 else None
        yield GroupSpec(
            f"request {number}",
            "somebody",
            tuple((common if number % 3 else []) + own),
            n=2 if beams else 1 + 2 * (number % 4 == 3),
            max_tokens=chooser.randrange(8, 20),
            min_tokens=number % 5,
            stop_token_ids=frozenset(range(0, VOCAB_SIZE, 37)),
            payload=sampling.SerializeToString(),
            computes_prompt=sampling.HasField("prompt_logprobs"),
            beams=beams,
        )


def answer_of(group: Group) -> Answer:
    prompt: dict[int, Any] = {}
    for piece in group.prompt_logprobs:
        for position, candidates in enumerate(piece.candidates, piece.first_position):
            assert prompt.setdefault(position, candidates) == candidates
    assert all(each.error is None for each in group.sequences)
    told = [(each.output_token_ids, each.logprobs, each.finish_reason, each.score) for each in group.sequences]
    return Answer(told, prompt)


def run(
    executor: StepExecutor | RanksExecutor, specs: Iterable[GroupSpec], sizes: ParallelSizes, **config: Any
) -> tuple[list[Answer], SchedulerStats]:
    """Runs requests to the end, with as many steps scheduled ahead as may be in flight."""
    epoch = next(EPOCHS)
    executor.begin_epoch(epoch)
    scheduler = Scheduler(
        CoreConfig(
            BLOCK_SIZE, NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS, MAX_LEN, MAX_SEQS, 64, debug_integrity=True, **config
        )
    )
    first = 1
    groups: list[Group] = []
    for spec in specs:
        groups.append(add_request(scheduler, spec, first))
        first += spec.num_sequence_ids
    in_flight = deque[bytes]()
    while scheduler.has_unfinished():
        while scheduler.can_schedule() and (output := scheduler.schedule()) is not None:
            in_flight.append(encode_group_step(output, epoch, sizes, 60.0, is_quiet=False))
        step = decode_step(ExecuteModelRequest.FromString(in_flight.popleft()))
        scheduler.update(decode_answer(encode_result(executor.execute(step, time.perf_counter())), LIMITS))
    return [answer_of(group) for group in groups], scheduler.stats()


def run_alone(network: Network) -> list[Answer]:
    """The truth: on one rank, each request by itself, nothing cached."""
    executor = network.make_executor()
    config: dict[str, Any] = {"enable_prefix_caching": False, "max_steps_in_flight": 1}
    answers = [run(executor, [spec], SIZES[0], **config)[0][0] for spec in make_requests()]
    choices = [sequence for answer in answers for sequence in answer.sequences]
    assert len({tuple(token_ids) for token_ids, *_ in choices}) > len(answers)
    assert len({reason for *_, reason, _ in choices}) == 2
    return answers


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A rank is a thread, so all of torch's together are what a test asks for."""
    available = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(available)


@pytest.fixture(scope="module", params=NETWORKS, ids=str)
def network(request: pytest.FixtureRequest) -> tuple[Network, list[Answer]]:
    """A network, and what requests get of it alone."""
    return request.param, run_alone(request.param)


def make_ranks(
    network: Network, sizes: ParallelSizes, drafting: DraftingOps | None = None
) -> StepExecutor | RanksExecutor:
    if sizes.world_size == 1:
        return network.make_executor(drafting=drafting)
    make_rank = partial(network.make_executor, drafting=drafting)
    return RanksExecutor(make_rank, sizes.tensor_parallel_size, sizes.pipeline_parallel_size)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda each: f"{each.tensor_parallel_size}x{each.pipeline_parallel_size}")
def test_any_number_of_ranks_gives_the_answers_of_running_alone_on_one(
    network: tuple[Network, Sequence[Answer]], sizes: ParallelSizes
) -> None:
    own, alone = network
    num_engines = sizes.num_virtual_engines
    answers, stats = run(
        make_ranks(own, sizes),
        make_requests(),
        sizes,
        max_prefill_chunk=11,
        preemption_mode="swap",
        max_steps_in_flight=max(2, num_engines),
        num_virtual_engines=num_engines,
    )
    for number, (answer, truth) in enumerate(zip(answers, alone, strict=True)):
        assert answer == truth, f"request {number}"
    # The proof that it did happen.
    assert stats.num_swapped_out_blocks_total > 0
    assert stats.num_swapped_in_blocks_total > 0
    assert stats.num_preemptions_total > stats.num_swaps_total > 0
    assert stats.num_cached_tokens_total > 0
    assert stats.num_copied_blocks_total > 0
    assert stats.num_prefill_pieces_total > 2 * NUM_REQUESTS


def test_drafts_change_no_answer(network: tuple[Network, Sequence[Answer]]) -> None:
    """The drafts are right, wrong, stop tokens and ids of the padding, in as many rows as fit and fewer."""
    own, alone = network
    sizes = ParallelSizes(2, 1)
    drafts = HostileDrafts([0, 1, 37, 74])
    for spec, answer in zip(make_requests(), alone, strict=True):
        drafts.texts += [[*spec.prompt_token_ids, *token_ids] for token_ids, *_ in answer.sequences]
    answers, stats = run(
        make_ranks(own, sizes, drafts),
        make_requests(),
        sizes,
        max_prefill_chunk=11,
        preemption_mode="swap",
        max_steps_in_flight=2,
        max_draft_tokens=MAX_DRAFT_TOKENS,
        max_draft_rows=MAX_DRAFT_ROWS,
    )
    for number, (answer, truth) in enumerate(zip(answers, alone, strict=True)):
        assert answer == truth, f"request {number}"
    assert 0 < stats.num_accepted_tokens_total < stats.num_draft_tokens_total
    assert stats.num_preemptions_total > 0
