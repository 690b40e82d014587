"""The CPU kernels under the compiler's sanitizers: programs that run them, built and run.

    python -m tests.kit.kernels.sanitizers

runs each program under each sanitizer for each instruction set that this processor has; a test runs a part of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kernels.cpu.build import COMMON_FLAGS, EMULATED_SETS, INSTRUCTION_SETS, SOURCES, WARNING_FLAGS, find_compiler
from kernels.cpu.processors import supported_instruction_sets

PROGRAMS = Path(__file__).parents[2] / "kernels" / "sanitized"
MEMORY = "address,undefined"
THREADS = "thread"
RUN_SECONDS = 900


@dataclass(frozen=True, slots=True)
class Sanitized:
    """A program of tests/kernels/sanitized.

    Attributes:
        program: its name.
        sanitizers: that it is compiled with.
        instruction_set: that the kernels are compiled for.
        optimization: more is slow to compile, less is slow to run.
        arguments: that it is run with; see its source.
    """

    program: str
    sanitizers: str
    instruction_set: str
    optimization: str = "-O1"
    arguments: tuple[str, ...] = ()

    def run(self, folder: Path) -> None:
        """Builds it in a folder and runs it. Raises AssertionError with all that it said, unless it ran clean."""
        compiler = find_compiler()
        assert compiler is not None, "the kernels' tests need a C++ compiler"
        binary = folder / f"{self.program}-{self.sanitizers}-{self.instruction_set}"
        common = [flag for flag in COMMON_FLAGS if flag not in ("-O3", "-shared")]
        flags = [
            *common,
            *WARNING_FLAGS,
            *(INSTRUCTION_SETS | EMULATED_SETS)[self.instruction_set],
            self.optimization,
            "-g",
        ]
        flags += [f"-fsanitize={self.sanitizers}", "-fno-sanitize-recover=all", f"-I{SOURCES}"]
        subprocess.run([compiler, *flags, "-o", binary, PROGRAMS / f"{self.program}.cpp"], check=True)
        # A sanitizer must be the first library of its process.
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        done = subprocess.run(
            [binary, *self.arguments],
            env=environment, capture_output=True, text=True, timeout=RUN_SECONDS, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "clean\n"), f"{self}: {done.returncode}\n{done.stderr}"


def main() -> None:
    """The program."""
    runs = [Sanitized("team", sanitizers, "avx2", arguments=("300",)) for sanitizers in (THREADS, MEMORY)]
    for name in supported_instruction_sets():
        runs += [Sanitized("ops", MEMORY, name, arguments=("all",)), Sanitized("ops", THREADS, name)]
        runs += [Sanitized("sampling", MEMORY, name, arguments=("all",)), Sanitized("sampling", THREADS, name)]
    with tempfile.TemporaryDirectory(prefix="sanitized-") as folder:
        for run in runs:
            run.run(Path(folder))
            sys.stdout.write(f"{run.program}, {run.instruction_set}: clean under {run.sanitizers}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
