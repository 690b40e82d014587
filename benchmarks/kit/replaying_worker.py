"""A worker process as it is, but for what it chooses: a greedy request gets an answer that was decided before.

    python -m benchmarks.kit.replaying_worker ANSWERS.json --worker-address=unix:/…

The network computes each row in full, and the likeliest token of each is found; then another one takes its place. So a
step costs what it costs, and what drafts gain does not depend on how well a model copies; but no step runs without
Python. The first id of a prompt says which of the answers (a list of lists of ids) comes: it is FIRST_TOKEN_ID and its
number.
"""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from blockyard.service import grpc_environment

grpc_environment.prepare()

import numpy as np

from benchmarks.kit.workload import FIRST_TOKEN_ID
from blockyard.service.process import run_process
from blockyard.settings import load
from worker_service import server
from worker_service.config import WorkerConfiguration
from worker_service.runner import model_runner
from worker_service.runner.chooser import Chooser

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from blockyard_kernels.capture import StepOutputs
    from blockyard_kernels.ops import Backend
    from blockyard_kernels.sampling import Flags
    from worker_service.batch.forward_batch import ForwardBatch
    from worker_service.batch.input_batch import InputBatch
    from worker_service.sampling.sampler import BeamCandidates, Sampled


class ReplayingChooser(Chooser):
    """Chooses the tokens of decided answers. Only for greedy requests without anything else."""

    def __init__(self, answers: npt.NDArray[np.int64], backend: Backend, vocab_size: int) -> None:
        """`answers` [number, place]: their ids."""
        super().__init__(backend, vocab_size)
        self._answers = answers

    def _decided(self, forward_batch: ForwardBatch, batch: InputBatch) -> npt.NDArray[np.int64]:
        """Returns the token of each chosen row: that of its place, as if all drafts before it were right."""
        runs, sampled = forward_batch.layout.runs, forward_batch.layout.sampled
        rows, offsets = (sampled.rows, 0) if runs is None else (runs.requests.rows, runs.offsets)
        inside = cast("Any", batch)
        places = inside._progress["num_tokens"][rows] + offsets - inside._requests.columns["prompt_length"][rows]
        numbers = inside._token_ids[rows, 0] - FIRST_TOKEN_ID
        is_known = (numbers >= 0) & (numbers < len(self._answers))
        return self._answers[np.where(is_known, numbers, 0), np.minimum(places, self._answers.shape[1] - 1)]

    def choose_replayed(
        self, outputs: StepOutputs, forward_batch: ForwardBatch, batch: InputBatch
    ) -> tuple[Sampled, BeamCandidates]:
        if outputs.best is not None:
            outputs = replace(outputs, best=self._decided(forward_batch, batch))
        return super().choose_replayed(outputs, forward_batch, batch)

    def choose(
        self, logits: Tensor, forward_batch: ForwardBatch, batch: InputBatch, finite: Flags | None = None
    ) -> tuple[Sampled, BeamCandidates]:
        for row, token_id in enumerate(self._decided(forward_batch, batch).tolist()):
            logits[row, token_id] = logits[row].max() + 1
        return super().choose(logits, forward_batch, batch, finite)


def main() -> None:
    """The program."""
    path, *flags = sys.argv[1:]
    answers: list[list[int]] = json.loads(Path(path).read_text())
    table = np.zeros((len(answers), max(map(len, answers))), np.int64)
    for number, answer in enumerate(answers):
        table[number, : len(answer)] = answer
    # The runner makes its chooser itself.
    cast("Any", model_runner).Chooser = functools.partial(ReplayingChooser, table)
    # The loop without Python would choose by itself.
    flags.append("--no-steady-loop")
    run_process("worker", load(WorkerConfiguration, "replaying_worker", "Replays answers.", flags), server.serve)


if __name__ == "__main__":
    main()
