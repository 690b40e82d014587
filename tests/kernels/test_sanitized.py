"""The kernels under the compiler's sanitizers, in short: `make sanitize` runs all instruction sets, and longer."""

from __future__ import annotations

import pytest

from tests.kit.kernels.backends import INSTRUCTION_SETS
from tests.kit.kernels.sanitizers import MEMORY, THREADS, Sanitized

# The last one is the quickest to compile.
RUNS = [
    run
    for name in INSTRUCTION_SETS[-1:]
    for run in (
        Sanitized("ops", MEMORY, name, "-O0"),
        Sanitized("sampling", MEMORY, name, "-O0"),
        Sanitized("team", THREADS, name, arguments=("10",)),
        Sanitized("queue", THREADS, name, arguments=("10",)),
    )
]


# It compiles for a minute and more, and beside other work for several.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.program}-{run.sanitizers}")
def test_it_runs_clean(run: Sanitized) -> None:
    run.run()
