"""What this machine can do at best, against which everything else is measured: bandwidth and arithmetic.

    python benchmarks/kernels/ceilings.py [--num-threads 2] [--seconds 2]

Bandwidth is that of the best of several plain read loops over memory in 2 MiB pages, well past any cache; the rates are
those of loops that multiply within registers, one for each instruction that this processor has for it. The loops are
C++, compiled when a process first asks. benchmarks/kernels/onednn.py measures what oneDNN reaches on a model.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.kit import processor

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-pthread")
BUFFER_BYTES = 1 << 30
# The widest first: what multiplies a wider kind can multiply a narrower one.
KINDS = ("float32", "bfloat16", "int8")
# A pass is long beside a barrier, and short beside what disturbs a machine.
TURNS_OF_A_PASS = 200_000


@dataclass(frozen=True, slots=True)
class Instruction:
    """Multiplies numbers of one of KINDS. `flag`: its name in /proc/cpuinfo; `on_tiles`: in tile registers."""

    name: str
    kind: str
    flag: str
    on_tiles: bool = False


# In the order of ceilings.cpp's loops.
INSTRUCTIONS = (
    Instruction("vfmadd231ps ymm", "float32", "fma"),
    Instruction("vfmadd231ps zmm", "float32", "avx512f"),
    Instruction("vdpbf16ps zmm", "bfloat16", "avx512_bf16"),
    Instruction("vpdpbusd ymm", "int8", "avx_vnni"),
    Instruction("vpdpbusd zmm", "int8", "avx512_vnni"),
    Instruction("tdpbf16ps", "bfloat16", "amx_bf16", on_tiles=True),
    Instruction("tdpbusd", "int8", "amx_int8", on_tiles=True),
)


@dataclass(frozen=True, slots=True)
class Rate:
    """Of one loop: units a second, by the median pass and by the best."""

    median: float
    best: float

    @classmethod
    def of(cls, amount: float, seconds: list[float]) -> Rate:
        """The rate of passes that each did the same amount."""
        return cls(amount / statistics.median(seconds), amount / min(seconds))


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of all threads together: bytes a second, and multiplications and additions a second by instruction's name."""

    num_threads: int
    bandwidth: Rate
    rates: dict[str, Rate]

    def rate(self, kind: str, *, on_tiles: bool = True) -> Rate:
        """Returns the rate of the fastest instruction for a kind or a wider one, or of the fastest on vectors alone."""
        kinds = KINDS[: KINDS.index(kind) + 1]
        able = (each for each in INSTRUCTIONS if each.kind in kinds and (on_tiles or not each.on_tiles))
        return max((self.rates[each.name] for each in able if each.name in self.rates), key=lambda rate: rate.best)


def usable_processors() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure(num_threads: int | None = None, seconds: float = 2.0) -> Ceilings:
    """Measures all ceilings, in about so many seconds; the first call in a process takes some more."""
    num_threads = num_threads or usable_processors()
    instructions = usable_instructions()
    rates = {each.name: measure_rate(each, num_threads, seconds / 2 / len(instructions)) for each in instructions}
    return Ceilings(num_threads, measure_bandwidth(num_threads, seconds / 2), rates)


def usable_instructions() -> list[Instruction]:
    """Lists what this processor has, and this process may use.

    Raises:
        RuntimeError: there is none.
    """
    flags = processor.flags()
    able = [each for each in INSTRUCTIONS if each.flag in flags]
    if any(each.on_tiles for each in able) and not _library().request_tiles():
        able = [each for each in able if not each.on_tiles]
    if not able:
        raise RuntimeError("ceilings are known for x86-64 with FMA alone")
    return able


def measure_bandwidth(num_threads: int, seconds: float) -> Rate:
    """The rate of the read loop that is fastest by its median."""
    library, buffer = _library(), _buffer(BUFFER_BYTES)
    # Each thread's part in whole pages.
    num_bytes = BUFFER_BYTES // (num_threads << 12) * (num_threads << 12)

    def read(reader: int, num_passes: int) -> list[float]:
        times = (ctypes.c_double * num_passes)()
        library.measure_read(reader, buffer, num_bytes, num_threads, num_passes, times)
        return list(times)

    num_readers = library.num_readers()
    num_passes = passes_for(seconds / num_readers, read(0, 3))
    rates = [Rate.of(num_bytes, read(reader, num_passes)) for reader in range(num_readers)]
    best = max(rate.best for rate in rates)
    return Rate(max(rate.median for rate in rates), best)


def measure_rate(instruction: Instruction, num_threads: int, seconds: float) -> Rate:
    """The rate of one of `usable_instructions()`."""
    library, number = _library(), INSTRUCTIONS.index(instruction)

    def multiply(num_passes: int) -> tuple[float, list[float]]:
        times = (ctypes.c_double * num_passes)()
        amount = library.measure_multiply(number, TURNS_OF_A_PASS, num_threads, num_passes, times)
        return amount, list(times)

    _, trial = multiply(3)
    return Rate.of(*multiply(passes_for(seconds, trial)))


def passes_for(seconds: float, trial: list[float]) -> int:
    """How many passes to make in so many seconds, at least 5, by the fastest of a trial."""
    return max(5, int(seconds / max(min(trial), 1e-9)))


def compile_loops(target: Path) -> None:
    """Compiles all loops into a library, those too that this processor cannot run."""
    subprocess.run([os.environ.get("CXX", "g++"), *FLAGS, "-o", str(target), str(SOURCE)], check=True)


@functools.cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="ceilings-") as folder:
        target = Path(folder) / "ceilings.so"
        compile_loops(target)
        library = ctypes.CDLL(str(target))
    times = ctypes.POINTER(ctypes.c_double)
    library.allocate.argtypes = [ctypes.c_size_t]
    library.allocate.restype = ctypes.c_void_p
    library.measure_read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, times]
    library.measure_read.restype = None
    library.measure_multiply.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_int, times]
    library.measure_multiply.restype = ctypes.c_double
    library.request_tiles.argtypes = []
    library.request_tiles.restype = ctypes.c_bool
    return library


@functools.cache
def _buffer(num_bytes: int) -> int:
    """Memory to read, held until the process ends: to fault it in takes longer than to read it."""
    address = _library().allocate(num_bytes)
    if address is None:
        raise MemoryError(f"no {num_bytes >> 20} MiB to read")
    return address


def describe(ceilings: Ceilings) -> str:
    """The ceilings for a person."""
    lines = [f"{f'{ceilings.num_threads} threads':33}{'median':>10}{'best':>10}"]
    rows = [("bandwidth", "", "GB/s", ceilings.bandwidth)]
    rows += [
        (each.name, each.kind, "Gop/s", ceilings.rates[each.name])
        for each in INSTRUCTIONS
        if each.name in ceilings.rates
    ]
    lines += [
        f"{name:17}{kind:10}{unit:6}{rate.median / 1e9:10.1f}{rate.best / 1e9:10.1f}" for name, kind, unit, rate in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-threads", type=int, default=usable_processors())
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    print(describe(measure(options.num_threads, options.seconds)))


if __name__ == "__main__":
    main()
