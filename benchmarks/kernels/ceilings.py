"""What this machine can do at best, against which everything else is measured: bandwidth and arithmetic.

    python benchmarks/kernels/ceilings.py [--num-threads 2] [--seconds 2]

Bandwidth is that of the best of several plain read loops over memory in 2 MiB pages, well past any cache; the rates are
those of loops that multiply within registers. The loops are C++, compiled for this processor when a process first asks.
benchmarks/kernels/onednn.py measures what oneDNN reaches on a model's matrices.
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

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-pthread")
BUFFER_BYTES = 1 << 30
KINDS = ("float32", "bfloat16", "int8")
# A pass is long beside a barrier, and short beside what disturbs a machine.
TURNS_OF_A_PASS = 200_000


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
    """Bytes a second, and multiplications and additions a second, of so many threads together.

    What the processor has no instruction for stands at the rate of the next wider type.
    """

    num_threads: int
    bandwidth: Rate
    float32: Rate
    bfloat16: Rate
    int8: Rate


def usable_processors() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure(num_threads: int | None = None, seconds: float = 2.0) -> Ceilings:
    """Measures all ceilings, in about so many seconds; the first call in a process takes some more."""
    num_threads = num_threads or usable_processors()
    float32 = measure_rate("float32", num_threads, seconds / 6)
    assert float32 is not None
    bfloat16 = measure_rate("bfloat16", num_threads, seconds / 6) or float32
    int8 = measure_rate("int8", num_threads, seconds / 6) or bfloat16
    return Ceilings(num_threads, measure_bandwidth(num_threads, seconds / 2), float32, bfloat16, int8)


def measure_bandwidth(num_threads: int, seconds: float) -> Rate:
    """The rate of the read loop that is fastest by its median."""
    library, buffer = _library(), _buffer()
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


def measure_rate(kind: str, num_threads: int, seconds: float) -> Rate | None:
    """The rate of one of KINDS; None where this processor has no instruction for it."""
    library = _library()

    def multiply(num_passes: int) -> tuple[float, list[float]]:
        times = (ctypes.c_double * num_passes)()
        amount = library.measure_multiply(KINDS.index(kind), TURNS_OF_A_PASS, num_threads, num_passes, times)
        return amount, list(times)

    amount, trial = multiply(3)
    return Rate.of(*multiply(passes_for(seconds, trial))) if amount else None


def passes_for(seconds: float, trial: list[float]) -> int:
    """How many passes to make in so many seconds, at least 5, by the fastest of a trial."""
    return max(5, int(seconds / max(min(trial), 1e-9)))


@functools.cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="ceilings-") as folder:
        target = Path(folder) / "ceilings.so"
        subprocess.run([os.environ.get("CXX", "g++"), *FLAGS, "-o", str(target), str(SOURCE)], check=True)
        library = ctypes.CDLL(str(target))
    times = ctypes.POINTER(ctypes.c_double)
    library.allocate.argtypes = [ctypes.c_size_t]
    library.allocate.restype = ctypes.c_void_p
    library.measure_read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, times]
    library.measure_read.restype = None
    library.measure_multiply.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_int, times]
    library.measure_multiply.restype = ctypes.c_double
    return library


@functools.cache
def _buffer() -> int:
    """Memory to read, held until the process ends: to fault it in takes longer than to read it."""
    address = _library().allocate(BUFFER_BYTES)
    if address is None:
        raise MemoryError(f"no {BUFFER_BYTES >> 20} MiB to read")
    return address


def describe(ceilings: Ceilings) -> str:
    """The ceilings for a person."""
    lines = [f"{ceilings.num_threads} threads{'median':>20}{'best':>10}"]
    for name, unit in (("bandwidth", "GB/s"), ("float32", "GFLOP/s"), ("bfloat16", "GFLOP/s"), ("int8", "GOP/s")):
        rate: Rate = getattr(ceilings, name)
        lines.append(f"{name:12}{unit:8}{rate.median / 1e9:10.1f}{rate.best / 1e9:10.1f}")
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
