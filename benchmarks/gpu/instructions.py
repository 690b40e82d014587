"""The instructions that compiled kernels got, read from their machine code: whether matrix units do the products.

On Hopper a product of 64 rows and more is one of a group of warps (HGMMA, in 8 bits QGMMA), and one of fewer rows of a
single warp (HMMA). A compiler that takes the latter for a prefill leaves half of the machine unused.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import triton

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

# Those that multiply.
KERNELS = ("_attend_items", "_multiply")
INSTRUCTIONS = ("HGMMA", "QGMMA", "HMMA")


@contextmanager
def launched_kernels() -> Generator[dict[int, Any]]:
    """Gathers kernels that are launched, each a `triton.compiler.CompiledKernel` by its id; none if interpreted."""
    found: dict[int, Any] = {}
    plain = triton.JITFunction.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        kernel = plain(self, *args, **options)
        if kernel is not None:
            found[id(kernel)] = kernel
        return kernel

    triton.JITFunction.run = run
    try:
        yield found
    finally:
        triton.JITFunction.run = plain


def describe(kernels: Iterable[Any]) -> list[dict[str, object]]:
    """Returns what each kernel that multiplies is made of.

    Raises:
        RuntimeError, OSError, subprocess.SubprocessError: there is no cuobjdump, or it fails.
    """
    found: list[dict[str, object]] = []
    for kernel in kernels:
        metadata = kernel.metadata
        if metadata.name in KERNELS:
            counts = count(kernel.asm["sass"])
            sizes = {name: getattr(metadata, name) for name in ("num_warps", "num_stages", "shared")}
            used = {name: getattr(kernel, name, None) for name in ("n_regs", "n_spills")}
            found.append({"kernel": metadata.name, **sizes, **used, **counts})
    return found


def count(machine_code: str) -> dict[str, int]:
    """Counts the instructions that multiply matrices in a disassembly."""
    counts: Counter[str] = Counter()
    for word in machine_code.replace(";", " ").split():
        name = word.partition(".")[0]
        if name in INSTRUCTIONS:
            counts[name] += 1
    return {name: counts[name] for name in INSTRUCTIONS}


def check(kernels: Iterable[Any]) -> tuple[list[dict[str, object]] | str, bool]:
    """Returns what `describe` does, or why nothing can be read; and whether a prefill multiplies as it should.

    True where nothing can be read.
    """
    try:
        found = describe(kernels)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return f"not checked: {error}", True
    if not found:
        return "not checked: kernels are interpreted", True
    return found, any(each["kernel"] == "_attend_items" and each["HGMMA"] for each in found)
