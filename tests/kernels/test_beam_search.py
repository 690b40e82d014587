"""Beam search through the scheduler against transformers: the same ids in the same order, with the same scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from blockyard.contract.sampling import BeamSearch, EarlyStopping, FinishReason
from blockyard_kernels.select import get_backend
from scheduler_service.core.scheduler import CoreConfig, Scheduler
from scheduler_service.core.values import GroupSpec, SchedulerOutput, StepResult
from tests.kit.kernels.step_runner import CPU, StepRunner
from tests.kit.kernels.tiny_models import MAX_LEN, VOCAB_SIZE, tiny_model
from tests.kit.oracles.core_requests import add_request
from worker_service.models.builder import build_decoder
from worker_service.models.model_config import read_config
from worker_service.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK_SIZE = 32
STOP_TOKEN_IDS = frozenset(range(1, VOCAB_SIZE, 9))
"""Many, so that beams of a model that says anything end now and then."""
MODES: dict[EarlyStopping, bool | str] = {
    EarlyStopping.HEURISTIC: False,
    EarlyStopping.FIRST: True,
    EarlyStopping.NEVER: "never",
}
CONFIG = CoreConfig(
    block_size=4,
    num_device_blocks=400,
    num_host_blocks=0,
    max_model_len=MAX_LEN,
    max_num_seqs=16,
    max_num_batched_tokens=24,
    debug_integrity=True,
)


class RunnerWorker:
    """Executes a scheduler's steps with a real model. It keeps tables of its own: those of the steps are not tested."""

    def __init__(self, name: str) -> None:
        folder = tiny_model(name)
        backend = get_backend(CPU, torch.float32, "reference")
        files = WeightFiles(folder, lambda done_bytes, total_bytes: None)
        model = build_decoder(read_config(folder, torch.float32), backend, files)
        self.runner = StepRunner(model, backend, block_size=BLOCK_SIZE, num_blocks=3000)
        self.known: dict[int, list[int]] = {}
        self.keys: dict[int, int] = {}
        self.candidates: dict[int, int] = {}
        self.num_keys = 0

    def execute(self, step: SchedulerOutput) -> StepResult:
        """Do what the step says. Forgotten rows stay in the runner, for forks may share their blocks."""
        for fork in step.forks:
            self._add(fork.child_id, self.known[fork.parent_id].copy(), self.candidates[fork.parent_id])
            self.runner.fork(self.keys[fork.parent_id], self.keys[fork.child_id])
        for sequence_id in step.finished_sequence_ids:
            self.known.pop(sequence_id, None)
        for new in step.new_sequences:
            self._add(new.sequence_id, list(new.token_ids), new.num_beam_candidates)
            if new.num_computed_tokens:
                self.runner.step([(self.keys[new.sequence_id], new.token_ids[: new.num_computed_tokens])])
        for sequence_id, token_id in step.input_ids:
            self.known[sequence_id].append(token_id)
        return StepResult(step.step_id, beam_candidates=dict(self._compute(step)))

    def _add(self, sequence_id: int, known: list[int], num_candidates: int) -> None:
        self.num_keys += 1
        self.keys[sequence_id] = self.num_keys
        self.known[sequence_id] = known
        self.candidates[sequence_id] = num_candidates

    def _compute(self, step: SchedulerOutput) -> Iterator[tuple[int, tuple[tuple[int, float], ...]]]:
        work: list[tuple[int, list[int]]] = []
        for sequence_id, count in zip(step.sequence_ids, step.num_new_tokens, strict=True):
            start = self.runner.length(self.keys[sequence_id])
            work.append((self.keys[sequence_id], self.known[sequence_id][start : start + count]))
        for sequence_id, logits in zip(step.sequence_ids, self.runner.step(work), strict=True):
            if self.runner.length(self.keys[sequence_id]) == len(self.known[sequence_id]):
                best = logits[-1].log_softmax(-1).topk(self.candidates[sequence_id])
                yield sequence_id, tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def search(worker: RunnerWorker, specs: list[GroupSpec]) -> dict[str, list[tuple[list[int], float, FinishReason]]]:
    """All of them at once, through a scheduler -> by request its sequences: output, score, reason."""
    scheduler = Scheduler(CONFIG)
    worker.known.clear()
    first_sequence_id = 1
    for spec in specs:
        add_request(scheduler, spec, first_sequence_id)
        first_sequence_id += spec.num_sequence_ids
    while step := scheduler.schedule():
        scheduler.update(worker.execute(step))
    ended = {group.spec.request_id: group.sequences for group in scheduler.take_ended()}
    return {
        request_id: [(s.output_token_ids, s.score or 0.0, s.finish_reason or FinishReason.ERROR) for s in sequences]
        for request_id, sequences in ended.items()
    }


def generate(model: Any, spec: GroupSpec) -> list[tuple[list[int], float, FinishReason]]:
    """The truth."""
    beams = spec.beams
    assert beams
    prompt = torch.tensor([spec.prompt_token_ids])
    answer = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        num_beams=beams.width,
        num_return_sequences=spec.n,
        length_penalty=beams.length_penalty,
        early_stopping=MODES[beams.early_stopping],
        max_new_tokens=spec.max_tokens,
        eos_token_id=sorted(spec.stop_token_ids) or None,
        pad_token_id=VOCAB_SIZE - 1,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    outputs = [_cut(output, spec) for output in answer.sequences[:, prompt.shape[1] :].tolist()]
    reasons = [FinishReason.STOP if o[-1] in spec.stop_token_ids else FinishReason.LENGTH for o in outputs]
    return list(zip(outputs, answer.sequences_scores.tolist(), reasons, strict=True))


def _cut(output: list[int], spec: GroupSpec) -> list[int]:
    """Without what fills it up behind its end."""
    ends = (place + 1 for place, token_id in enumerate(output) if token_id in spec.stop_token_ids)
    return output[: next(ends, spec.max_tokens)]


def make_specs(beams: BeamSearch, max_tokens: int, stop: frozenset[int]) -> list[GroupSpec]:
    """Prompts of several lengths: of one token, about a block of the cache, more than a step's budget."""
    prompts = [tuple((7 * place * place + 5 * length) % VOCAB_SIZE for place in range(length)) for length in (1, 8, 37)]
    return [
        GroupSpec(str(len(prompt)), "", prompt, beams.width, max_tokens, 0, stop, beams=beams) for prompt in prompts
    ]


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def models(request: pytest.FixtureRequest) -> tuple[Any, RunnerWorker]:
    """A model twice: transformers' and ours."""
    name: str = request.param
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(name), dtype=torch.float32)
    return theirs.eval(), RunnerWorker(name)


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("length_penalty", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("early_stopping", EarlyStopping)
def test_it_is_the_beam_search_of_transformers(
    models: tuple[Any, RunnerWorker], width: int, length_penalty: float, early_stopping: EarlyStopping
) -> None:
    theirs, ours = models
    beams = BeamSearch(width, length_penalty, early_stopping)
    check(theirs, ours, make_specs(beams, 20, STOP_TOKEN_IDS))


def test_a_search_that_nothing_ends_goes_on_to_max_tokens(models: tuple[Any, RunnerWorker]) -> None:
    check(*models, make_specs(BeamSearch(4), 12, frozenset()))


def check(theirs: Any, ours: RunnerWorker, specs: list[GroupSpec]) -> None:
    """Hold all of them, run at once, against the truth."""
    found = search(ours, specs)
    for spec in specs:
        sequences, truth = found[spec.request_id], generate(theirs, spec)
        assert [(output, reason) for output, _, reason in sequences] == [
            (output, reason) for output, _, reason in truth
        ]
        assert [score for _, score, _ in sequences] == pytest.approx([score for _, score, _ in truth], abs=1e-4)


def test_the_settings_make_a_difference() -> None:
    """Or the tests above would show little."""
    worker = RunnerWorker("llama")
    found = {
        (length_penalty, early_stopping): str(
            search(worker, make_specs(BeamSearch(2, length_penalty, early_stopping), 20, STOP_TOKEN_IDS))
        )
        for length_penalty in (1.0, 2.0)
        for early_stopping in EarlyStopping
    }
    assert len(set(found.values())) == len(found)
