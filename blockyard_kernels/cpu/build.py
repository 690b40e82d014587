"""Compiles the C++ kernels: one library for each instruction set, in a folder named by a hash of source and flags.

`make setup`, builds of wheels and images, and `blockyard serve` where a package was installed without compiled kernels
run this program (`python -m blockyard_kernels.cpu.build`, or this file directly); workers never do. A library file is
always complete: it is written under another name and then renamed. A file lock, which ends with its process, keeps two
builds apart.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SOURCES = Path(__file__).parent / "csrc"
COMMON_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-ffp-contract=off")
# GCC 12 warns of uninitialised values in its own AVX512 headers.
WARNING_FLAGS = ("-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {
    # Work outside of AMX tiles is done in float32: processors with AMX are slow at AVX512's bfloat16 instructions.
    "amx": (*AVX512_FLAGS, "-DBLOCKYARD_AMX"),
    "avx512_bf16": (*AVX512_FLAGS, "-mavx512bf16", "-mavx512vnni"),
    "avx512": AVX512_FLAGS,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
}
"""Best first, with the compiler's flags."""
EMULATED_SETS: dict[str, tuple[str, ...]] = {"amx_emulated": (*AVX512_FLAGS, "-O1", "-DBLOCKYARD_EMULATED_AMX")}
"""Slow emulations of the arithmetic of other processors, for tests. `make setup` does not build them."""


def built_folder() -> Path:
    """Returns the folder for the libraries of exactly this source, whether they are built or not.

    It lies in BLOCKYARD_KERNELS_DIR if that is set, else beside the source, where a wheel for Linux has it. For a
    package that was installed without, whose own folder may be read-only, it lies in the user's cache.
    """
    root = os.environ.get("BLOCKYARD_KERNELS_DIR")
    return (Path(root) if root else _usual_root()) / _source_digest()


def _usual_root() -> Path:
    beside = Path(__file__).resolve().parent / "built"
    if beside.is_dir() or not {"site-packages", "dist-packages"} & set(beside.parts):
        return beside
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "blockyard" / "kernels"


def library_path(instruction_set: str) -> Path:
    """Returns the path of an instruction set's library, whether it is built or not."""
    return built_folder() / f"{instruction_set}.so"


def _source_digest() -> str:
    digest = hashlib.sha256(repr((COMMON_FLAGS, WARNING_FLAGS, INSTRUCTION_SETS, EMULATED_SETS)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_compiler() -> str | None:
    """Returns the path of the C++ compiler: CXX, else g++ or clang++; None if none is found."""
    return next(
        (found for name in (os.environ.get("CXX"), "g++", "clang++") if name and (found := shutil.which(name))), None
    )


def build(compiler: str, instruction_sets: Iterable[str] = INSTRUCTION_SETS) -> list[Path]:
    """Builds the libraries that are missing, and returns the paths of all requested libraries.

    Raises:
        subprocess.CalledProcessError: the compiler failed and has printed its errors.
    """
    folder = built_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock, ThreadPoolExecutor(os.cpu_count()) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [name for name in instruction_sets if not library_path(name).exists()]
        list(pool.map(lambda name: _compile(compiler, name), missing))
    return [library_path(name) for name in instruction_sets]


def _compile(compiler: str, instruction_set: str) -> None:
    path = library_path(instruction_set)
    unfinished = path.with_suffix(f".{os.getpid()}")
    flags = (*COMMON_FLAGS, *WARNING_FLAGS, *(INSTRUCTION_SETS | EMULATED_SETS)[instruction_set])
    try:
        subprocess.run([compiler, *flags, "-o", str(unfinished), str(SOURCES / "library.cpp")], check=True)
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def main() -> None:
    if all(library_path(name).exists() for name in INSTRUCTION_SETS):
        return
    if platform.machine().lower() not in ("x86_64", "amd64"):
        sys.stderr.write("the CPU kernels are for x86-64: torch computes on this processor, which is slower\n")
        return
    compiler = find_compiler()
    if compiler is None:
        sys.stderr.write(
            "no C++ compiler: workers on a CPU will use the reference kernels, which are slower; "
            "install g++, or the wheel for Linux on x86-64, which has the kernels compiled\n"
        )
        return
    sys.stderr.write(f"compiling the CPU kernels, once, into {built_folder()}: about a minute\n")
    sys.stderr.flush()
    build(compiler)


if __name__ == "__main__":
    main()
