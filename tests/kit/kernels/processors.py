"""Other processors' kernels on this one: libraries that choose theirs at start are made to choose otherwise.

    python -m tests.kit.kernels.processors [arguments of pytest]

runs the kernels' tests on each; a test sweeps a part of what the reference promises. What no setting brings here is
AMX: products as its tiles make them are in `row_dependent`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
RUN_SECONDS = 1800
# MKL takes its AVX512 kernels on Intel's processors alone. Both are its own names, told here that this is one.
INTEL = "int mkl_serv_intel_cpu_true(void) { return 1; }\nint mkl_serv_intel_cpu(void) { return 1; }\n"


@dataclass(frozen=True, slots=True)
class Report:
    """What a sweep found: how many ops promised their rows' bits, and which of them broke the promise."""

    num_promised: int
    broken: list[str]


@dataclass(frozen=True, slots=True)
class Processor:
    """A processor whose kernels this one can run, and the variables by which libraries choose them."""

    name: str
    variables: dict[str, str] = field(default_factory=dict[str, str])
    preloads_intel: bool = False

    def environment(self, folder: Path) -> dict[str, str]:
        """Makes the environment of a process that computes as on this processor; a folder holds what it loads."""
        environment = {**os.environ, **self.variables}
        if self.preloads_intel:
            library = folder / "intel.so"
            command = [os.environ.get("CXX", "g++"), "-x", "c", "-shared", "-fPIC", "-o", str(library), "-"]
            subprocess.run(command, input=INTEL.encode(), check=True)
            environment["LD_PRELOAD"] = str(library)
        return environment

    def sweep(self, folder: Path) -> Report:
        """Compares the rows of ops that are promised, in shapes and arrangements that the probe does not try."""
        command = [sys.executable, "-m", "tests.kit.kernels.promises"]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment(folder), capture_output=True, timeout=RUN_SECONDS, check=True
        )
        return Report(**json.loads(done.stdout))

    def __str__(self) -> str:
        return self.name


PROCESSORS = (Processor("avx512 of intel", preloads_intel=True),)
"""Those that a test sweeps."""
MORE_PROCESSORS = (
    Processor("this one"),
    # Tiles of few rows, which break the rules of the fastest methods.
    Processor("sse2", {"MKL_CBWR": "COMPATIBLE"}),
    Processor("avx2", {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}),
    Processor("avx512 without bfloat16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}),
    Processor("avx2 of intel", {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}, preloads_intel=True),
)


def main() -> int:
    """Runs the kernels' tests on each processor; gives 1 where some failed."""
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="processors-") as folder:
        for processor in (*PROCESSORS, *MORE_PROCESSORS):
            report = processor.sweep(Path(folder))
            sys.stdout.write(f"== {processor}: {report.num_promised} ops promised, broken: {report.broken}\n")
            sys.stdout.flush()
            command = [sys.executable, "-m", "pytest", "-q", "tests/kernels", *sys.argv[1:]]
            done = subprocess.run(
                command, cwd=ROOT, env=processor.environment(Path(folder)), timeout=RUN_SECONDS, check=False
            )
            if done.returncode or report.broken:
                failed.append(str(processor))
    sys.stdout.write("failed on: " + ", ".join(failed) if failed else "passed on all")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
