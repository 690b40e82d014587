"""Compiles kernels for a Hopper GPU where there is none: what they need of one, and which instructions they got.

For a process of its own, in which nothing is interpreted: ops of `blockyard_kernels.cuda` that are called within
`compiling` on tensors of the processor compile what they would launch, and launch nothing.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARED_BYTES = 227 * 1024
"""What a program may have at most."""


class _Hopper:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _leave_unassembled(backend: Any, stages: dict[str, Any], *_: Any) -> None:
    stages["cubin"] = lambda source, metadata: b""


@contextmanager
def compiling(*, assembles: bool = True) -> Iterator[list[Any]]:
    """Lists the kernels, each `triton.compiler.CompiledKernel`, in the order in which they would be launched.

    Without `assembles` they end as PTX: NVIDIA's assembler takes a fourth of the time, and tells whether one fits.
    """
    if not assembles:
        knobs.runtime.add_stages_inspection_hook = _leave_unassembled
        # Which stages there were is no part of a kernel's key.
        knobs.cache.dir = f"{knobs.cache.dir}/unassembled"
    compiled: list[Any] = []
    plain = triton.JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled.append(plain(self, *args, grid=grid, warmup=True, **options))
        return compiled[-1]

    triton.JITFunction.run = run
    driver.set_active(_Hopper())
    yield compiled
    triton.JITFunction.run = plain
