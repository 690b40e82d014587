"""A worker's executor on the GPU backend that launches ahead, with decodes as graphs, against one that does neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from blockyard.contract.sampling import SamplingParams
from blockyard.contract.workers import LoraLimits
from blockyard_kernels.reference.backend import ReferenceBackend
from tests.kit.kernels.late import make_late
from tests.kit.kernels.strict_graphs import StrictRecording
from tests.kit.kernels.tiny_adapters import make_tiny_adapter
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.kernels.triton_interpreter import DEVICE, IS_INTERPRETED
from tests.unit.worker_service.executor import Epoch, make_executor, new_sequence
from worker_service.lora.adapter import LoraRequest
from worker_service.lora.reader import AdapterReader
from worker_service.lora.slots import AdapterSlots
from worker_service.models import loader

from blockyard_kernels.cuda import graphs  # isort: skip
from blockyard_kernels.cuda.backend import CudaBackend  # isort: skip

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest

    from blockyard_kernels.ops import Backend
    from worker_service.steps.step_executor import StepExecutor

NUM_OUTPUT = 4
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=5, temperature=0.9),
    SamplingParams(seed=6, temperature=1.1, top_k=20, top_p=0.9),
]
PROMPTS = [[3, 17, 2, 40], [4, 17], [5, 17, 12]]


def executor_of(
    backend: Backend, patch: pytest.MonkeyPatch, *, is_invariant: bool, adapters: Sequence[Path] = ()
) -> StepExecutor:
    """`adapters`: for which there is one slot."""
    patch.setattr(loader, "get_backend", lambda *_, **__: backend)
    patch.setattr(graphs, "TOKEN_MULTIPLE", 4)
    loaded = loader.load_model(tiny_model("llama"), torch.float32, DEVICE, lambda done, total: None)
    slots = None
    if adapters:
        assert backend.lora is not None
        reader = AdapterReader(loaded.model, backend.lora, LoraLimits(1, 8, len(adapters)))
        known = {i: reader.read(LoraRequest(i, folder.name, ""), folder) for i, folder in enumerate(adapters, 1)}
        slots = AdapterSlots(1, known, reader.write)
    return make_executor(loaded, max_captured_tokens=4, is_invariant=is_invariant, slots=slots)


def outputs(executor: StepExecutor) -> dict[int, list[int]]:
    """The tokens of three sequences: prompts in pieces beside each other, then decodes, of 3 and then of 2."""
    new = tuple(
        new_sequence(number, prompt, range(1 + 2 * number, 3 + 2 * number), SAMPLINGS[number])
        for number, prompt in enumerate(PROMPTS)
    )
    steps = [
        {"new_sequences": new, "work": [(0, 3), (1, 2), (2, 3)]},
        {"work": [(0, 1), (1, 1), (2, 1)]},
        *({"work": [(0, 1), (2, 1)]} for _ in range(NUM_OUTPUT - 1)),
    ]
    return run(executor, steps)


def adapted_outputs(executor: StepExecutor) -> dict[int, list[int]]:
    """The tokens of one sequence without an adapter, and of others, each with its own, that take the slot in turn."""
    steps: list[dict[str, Any]] = []
    for number, prompt in enumerate(PROMPTS):
        blocks = range(1 + 2 * number, 3 + 2 * number)
        new = (new_sequence(number, prompt, blocks, SAMPLINGS[0], lora_id=number),)
        slot = {"activated_lora_slots": np.array([0]), "activated_lora_ids": np.array([number])} if number else {}
        done = {"finished_sequence_ids": (number - 1,)} if number > 1 else {}
        beside = [(0, 1)] if number else []
        steps.append({"new_sequences": new, "work": [*beside, (number, len(prompt))], **slot, **done})
        steps += [{"work": [*beside, (number, 1)]}] * number
    return run(executor, steps)


def run(executor: StepExecutor, steps: Sequence[dict[str, Any]]) -> dict[int, list[int]]:
    """Submits steps one behind the other, and returns the tokens of each sequence."""
    epoch, results = Epoch(executor, 1), []
    for step in steps:
        results += executor.submit(epoch.make(**step), 0.0)
    results += executor.finish_all()
    told: dict[int, list[int]] = {}
    for _, result in results:
        assert result.refusal is None, result.refusal
        for sequence_id, token_id in zip(result.sequence_ids, result.token_ids, strict=True):
            told.setdefault(sequence_id, []).append(token_id)
    return told


def test_tokens_are_those_of_a_worker_that_waits_for_each_step(monkeypatch: pytest.MonkeyPatch):
    truth = outputs(executor_of(ReferenceBackend(torch.device("cpu")), monkeypatch, is_invariant=True))
    backend = CudaBackend(DEVICE)
    if IS_INTERPRETED:
        backend.record, launcher = StrictRecording, make_late(backend, 2)
    late = executor_of(backend, monkeypatch, is_invariant=False)
    assert outputs(late) == truth
    if IS_INTERPRETED:
        assert launcher.most == 2


def test_slots_change_hands_behind_the_steps_that_are_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    adapters = [make_tiny_adapter(tmp_path / str(seed), tiny_model("llama"), seed) for seed in range(2)]
    truth_backend = ReferenceBackend(torch.device("cpu"))
    truth = adapted_outputs(executor_of(truth_backend, monkeypatch, is_invariant=True, adapters=adapters))
    backend = CudaBackend(DEVICE)
    if IS_INTERPRETED:
        backend.record, launcher = StrictRecording, make_late(backend, 2)
    late = executor_of(backend, monkeypatch, is_invariant=False, adapters=adapters)
    assert adapted_outputs(late) == truth
    assert late.num_late_steps == 5, "all but the first"
    if IS_INTERPRETED:
        assert launcher.most == 2
