"""Runs a service of a cluster: `python -m tests.kit.processes.cluster_child MODULE [FLAG ...]`.

With token ids in BLOCKYARD_TEST_POISON, separated by commas, a worker kills itself when it is to compute a prompt that
begins so. A worker does to itself what signals say: see `tests.kit.chaos.rank_faults`. With LATE_DEPTH its device is
late: see `tests.kit.kernels.late_worker`.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import TYPE_CHECKING

from tests.kit.chaos.rank_faults import obey_signals
from tests.kit.kernels.late_worker import DEPTH_VARIABLE, make_backends_late

if TYPE_CHECKING:
    from worker_service.step import Step, StepOutput

POISON_VARIABLE = "BLOCKYARD_TEST_POISON"


def die_of(poison: list[int]) -> None:
    """Has this worker die of a prompt: in the middle of a step, as a kernel's fault would have it."""
    from worker_service.steps.step_executor import StepExecutor

    submit = StepExecutor.submit

    def submit_or_die(self: StepExecutor, step: Step, arrival: float) -> list[tuple[Step, StepOutput]]:
        if any(new.token_ids[: len(poison)].tolist() == poison for new in step.new_sequences):
            os.kill(os.getpid(), signal.SIGKILL)
        return submit(self, step, arrival)

    StepExecutor.submit = submit_or_die


def main() -> None:
    """The program."""
    module, *flags = sys.argv[1:]
    sys.argv = [module, *flags]
    if module == "worker_service":
        obey_signals()
        if poison := os.environ.get(POISON_VARIABLE):
            die_of([int(token_id) for token_id in poison.split(",")])
        if DEPTH_VARIABLE in os.environ:
            make_backends_late()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
