"""The CPU kernels under the compiler's sanitizers: programs that run them, built and run.

    python -m tests.kit.kernels.sanitizers

runs each program under each sanitizer for each instruction set that this processor has; a test runs a part of it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from blockyard_kernels.cpu.build import (
    COMMON_FLAGS,
    EMULATED_SETS,
    INSTRUCTION_SETS,
    SOURCES,
    WARNING_FLAGS,
    built_folder,
    find_compiler,
)
from blockyard_kernels.cpu.processors import supported_instruction_sets

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

    def run(self) -> None:
        """Builds it, unless it is built, and runs it. Raises AssertionError with what it said, unless it ran clean."""
        # A sanitizer must be the first library of its process.
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        # What is undefined is a trap, and gets the report of a crash: its place, and who called it.
        environment["ASAN_OPTIONS"] = "handle_sigill=1"
        done = subprocess.run(
            [self._build(), *self.arguments],
            env=environment, capture_output=True, text=True, timeout=RUN_SECONDS, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "clean\n"), f"{self}: {done.returncode}\n{done.stderr}"

    def _build(self) -> Path:
        """Builds it beside the libraries of the same kernels, under a name that tells what else it is made of."""
        compiler = find_compiler()
        assert compiler is not None, "the kernels' tests need a C++ compiler"
        common = [flag for flag in COMMON_FLAGS if flag not in ("-O3", "-shared")]
        flags = [
            *common,
            *WARNING_FLAGS,
            *(INSTRUCTION_SETS | EMULATED_SETS)[self.instruction_set],
            self.optimization,
            # Lines are all that a report tells, and a trap needs no words for each check: a third less to compile.
            "-g1",
        ]
        flags += [f"-fsanitize={self.sanitizers}", "-fno-sanitize-recover=all", f"-I{SOURCES}"]
        if self.sanitizers == MEMORY:
            flags.append("-fsanitize-undefined-trap-on-error")
        digest = hashlib.sha256(repr((compiler, flags)).encode())
        for path in sorted(PROGRAMS.iterdir()):
            digest.update(path.read_bytes())
        binary = built_folder() / f"{self.program}-{digest.hexdigest()[:16]}"
        if not binary.exists():
            binary.parent.mkdir(parents=True, exist_ok=True)
            unfinished = binary.with_suffix(f".{os.getpid()}")
            subprocess.run([compiler, *flags, "-o", unfinished, PROGRAMS / f"{self.program}.cpp"], check=True)
            unfinished.rename(binary)
        return binary


def main() -> None:
    """The program."""
    runs = [
        Sanitized(program, sanitizers, "avx2", arguments=("300",))
        for program in ("team", "queue")
        for sanitizers in (THREADS, MEMORY)
    ]
    for name in supported_instruction_sets():
        runs += [Sanitized("ops", MEMORY, name, arguments=("all",)), Sanitized("ops", THREADS, name)]
        runs += [Sanitized("sampling", MEMORY, name, arguments=("all",)), Sanitized("sampling", THREADS, name)]
    for run in runs:
        run.run()
        sys.stdout.write(f"{run.program}, {run.instruction_set}: clean under {run.sanitizers}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
