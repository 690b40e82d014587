"""Stage `table` of gpu_day.sh: other launches than blockyard_kernels/cuda/launch_table.py has, for the hottest.

What is faster is a proposal, for a person to put into the table: nothing is applied by itself. Keys that are multiplied
at a time, and steps along the inner dimension, stay: they are part of a row's bits.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.shapes import BLOCK_SIZE, block_tables, shape
from benchmarks.gpu.stage import Stage, start
from blockyard_kernels.cuda import gemm, launch_table
from blockyard_kernels.cuda.backend import CudaBackend
from blockyard_kernels.cuda.launch_table import AttentionLaunch, GemmLaunch
from blockyard_kernels.ops import kv_pool_shape
from blockyard_kernels.shapes import AttentionShape
from tests.kit.kernels.triton_interpreter import IS_INTERPRETED
from worker_service.models.random_weights import random_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from worker_service.models.model_config import ModelConfig

    Launch = AttentionLaunch | GemmLaunch

# Warps and stages.
ATTENTION = ((4, 2), (4, 3), (4, 4), (8, 2), (8, 3))
PRODUCTS_OF_64_ROWS = (
    GemmLaunch(64, 32, 4, 6, 2),
    GemmLaunch(64, 64, 4, 4, 2),
    GemmLaunch(64, 128, 4, 4, 1),
    GemmLaunch(64, 128, 8, 4, 1),
)


@contextmanager
def replaced(table: dict[Any, Any], value: Any) -> Generator[None]:
    """Puts one value into the place of all of a table's."""
    before = dict(table)
    table |= dict.fromkeys(table, value)
    try:
        yield
    finally:
        table |= before


class Candidates:
    """Times one kernel with the launch that it has, then with others."""

    def __init__(self, stage: Stage, config: ModelConfig) -> None:
        self._stage = stage
        self._config = config

    def _measure(self, kernel: str, launch: Launch, run: Callable[[], object], *, is_now: bool) -> None:
        parts = ", ".join(f"{name} {value}" for name, value in asdict(launch).items())
        name = f"{kernel}: {parts}"
        self._stage.measure(name, run, {}, recorded=True)
        self._stage.keep(name, {**self._stage.results[name], "kernel": kernel, "is_now": is_now})

    def attention(self, kernel: str, num_new: Sequence[int], lengths: Sequence[int], tile: int) -> None:
        """Attention over tiles of so many rows."""
        config = self._config
        heads = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5)
        device, tables = self._stage.device, block_tables(lengths)
        backend = CudaBackend(device)
        sizes = kv_pool_shape(tables[-1][-1] + 1, 1, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        pool = random_tensor("pool", sizes, 1.0, config.dtype, device)
        sizes = (sum(num_new), config.num_heads, config.head_dim)
        query = random_tensor("query", sizes, 1.0, config.dtype, device)
        batch = backend.plan_attention(list(num_new), list(lengths), tables, BLOCK_SIZE)
        now = launch_table.attention_launch(config.dtype.itemsize, tile, config.head_dim)
        others = [replace(now, num_warps=num_warps, num_stages=num_stages) for num_warps, num_stages in ATTENTION]
        for launch in self._in_order(now, others):
            with replaced(launch_table.ATTENTION[config.dtype.itemsize], launch):
                self._measure(
                    kernel, launch, lambda: backend.paged_attention(query, batch, pool, 0, heads), is_now=launch == now
                )

    def product(self, kernel: str, num_rows: int, num_out: int, num_in: int) -> None:
        """Our kernel's product of so many rows."""
        config, device = self._config, self._stage.device
        rows = random_tensor("rows", (num_rows, num_in), 1.0, config.dtype, device)
        weight = random_tensor("weight", (num_out, num_in), 1.0, config.dtype, device)
        now = launch_table.gemm_launch(config.dtype.itemsize, True, num_rows)
        for launch in self._in_order(now, PRODUCTS_OF_64_ROWS):
            with replaced(launch_table.GEMM, ((None, launch),)):
                self._measure(kernel, launch, lambda: gemm.multiply(rows, weight), is_now=launch == now)

    def _in_order(self, now: Launch, others: Sequence[Launch]) -> list[Any]:
        """The present one and then the others, interpreted one of them."""
        return [now, *[other for other in others if other != now][: 1 if IS_INTERPRETED else None]]


def main() -> None:
    """Times all candidates."""
    stage = start(__doc__)
    candidates = Candidates(stage, shape(is_dry=stage.is_dry))
    batch, context, prompt = (1, 20, 12) if stage.is_dry else (64, 1024, 8192)
    candidates.attention(f"attention of decodes {batch} x {context}", [1] * batch, [context] * batch, 16)
    candidates.attention(f"attention of a prefill {prompt}", [prompt], [prompt], 64)
    candidates.product("product of 64 rows", *((3, 64, 64) if stage.is_dry else (64, 28672, 4096)))


if __name__ == "__main__":
    main()
