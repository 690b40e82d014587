"""Stage `ops` of benchmarks/gpu_day.sh: each op at the shapes of one layer, beside what the machine could do at best.

`ideal_seconds` is the longer of two: its bytes at the copy bandwidth, its products at the matrix rate, both measured in
the same run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.gpu.shapes import shape
from benchmarks.gpu.stage import Stage, start
from kernels.ops import AttentionShape, kv_pool_shape
from kernels.sampling import Choices
from kernels.select import get_backend
from worker_service.models.random_weights import random_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kernels.ops import Backend
    from worker_service.models.model_config import ModelConfig

BLOCK_SIZE = 16


class OpTable:
    """Times ops of a network's shape, one after another."""

    def __init__(self, stage: Stage, config: ModelConfig, backend: Backend) -> None:
        self._stage = stage
        self._config = config
        self._backend = backend
        self._ceilings = stage.ceilings()
        self._heads = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5)

    def _random(self, *sizes: int) -> Tensor:
        return random_tensor(f"{sizes}", sizes, 1.0, self._config.dtype, self._stage.device)

    def _measure(self, name: str, run: object, num_bytes: float, flops: float = 0.0) -> None:
        ideal: dict[str, float] = {}
        if self._ceilings:
            seconds = num_bytes / self._ceilings["bandwidth"], flops / self._ceilings["bfloat16"]
            ideal["ideal_seconds"] = max(seconds)
        self._stage.measure(name, run, **ideal)  # type: ignore[arg-type]

    def linears(self, row_counts: Sequence[int]) -> None:
        """The five products, by the number of rows."""
        config, size = self._config, self._config.dtype.itemsize
        hidden, inner, queries = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        weights = {
            "qkv": (queries + 2 * keys, hidden, False),
            "output": (hidden, queries, False),
            "gate_up": (2 * inner, hidden, True),
            "down": (hidden, inner, False),
            "head": (config.vocab_size, hidden, False),
        }
        for name, (num_out, num_in, gated) in weights.items():
            packed = self._backend.pack_linear([self._random(num_out, num_in)], gated=gated)
            for rows in row_counts:
                if name == "head" and rows > 256:
                    continue
                hidden_rows = self._random(rows, num_in)
                self._measure(
                    f"linear {name} {rows} rows",
                    lambda rows=hidden_rows, packed=packed: self._backend.linear(rows, packed),
                    (num_out * num_in + rows * (num_in + num_out)) * size,
                    2.0 * rows * num_out * num_in,
                )

    def elementwise(self, row_counts: Sequence[int]) -> None:
        """Norms, the activation and rows of the embedding."""
        config, size = self._config, self._config.dtype.itemsize
        weight = torch.ones(config.hidden_size, dtype=config.dtype, device=self._stage.device)
        for rows in row_counts:
            hidden, residual = self._random(rows, config.hidden_size), self._random(rows, config.hidden_size)
            self._measure(
                f"rms_norm {rows} rows",
                lambda hidden=hidden, residual=residual: self._backend.rms_norm(hidden, weight, 1e-5, residual),
                4 * hidden.numel() * size,
            )
            gates = self._random(rows, 2 * config.intermediate_size)
            self._measure(
                f"silu_and_mul {rows} rows",
                lambda gates=gates: self._backend.silu_and_mul(gates),
                1.5 * gates.numel() * size,
            )

    def attention(self, name: str, num_new: Sequence[int], lengths: Sequence[int]) -> None:
        """Writes keys and values of a step, and attends to them."""
        config, heads, device = self._config, self._heads, self._stage.device
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        starts = np.cumsum([1, *counts])
        tables = [list(range(start, start + count)) for start, count in zip(starts[:-1], counts, strict=True)]
        pool_shape = kv_pool_shape(int(starts[-1]), 1, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        pool = torch.zeros(pool_shape, dtype=config.dtype, device=device)
        batch = self._backend.plan_attention(list(num_new), list(lengths), tables, BLOCK_SIZE)
        rows, width = sum(num_new), (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        qkv, rotary = self._random(rows, width), self._random(rows, 2, config.head_dim)
        size = config.dtype.itemsize
        self._measure(
            f"rotary_and_cache {name}",
            lambda: self._backend.rotary_and_cache(qkv, rotary, batch, pool, 0, heads),
            2 * qkv.numel() * size,
        )
        query = self._random(rows, config.num_heads, config.head_dim)
        seen = sum(new * length - new * (new - 1) / 2 for new, length in zip(num_new, lengths, strict=True))
        self._measure(
            f"paged_attention {name}",
            lambda: self._backend.paged_attention(query, batch, pool, 0, heads),
            sum(lengths) * 2 * config.num_kv_heads * config.head_dim * size,
            4.0 * seen * config.num_heads * config.head_dim,
        )

    def sampling(self, row_counts: Sequence[int]) -> None:
        """The likeliest token, and a draw from a nucleus."""
        for rows in row_counts:
            logits = random_tensor("logits", (rows, self._config.vocab_size), 3.0, torch.float32, self._stage.device)
            for name, temperature, top_p in (("greedy", 0.0, 1.0), ("top_p 0.9", 1.0, 0.9)):
                choices = Choices(
                    np.full(rows, temperature, np.float32),
                    np.zeros(rows, np.int64),
                    np.full(rows, top_p, np.float32),
                    np.zeros(rows, np.float32),
                    *(np.arange(rows, dtype=np.int64) for _ in range(3)),
                )
                self._measure(
                    f"sample {name} {rows} rows",
                    lambda logits=logits, choices=choices: self._backend.sampling.choose(logits, choices),
                    logits.nbytes,
                )

    def blocks(self, count: int) -> None:
        """Swaps and copies of whole blocks, all layers of them."""
        config = self._config
        pool_shape = kv_pool_shape(2 * count, config.num_layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        pool = torch.zeros(pool_shape, dtype=config.dtype, device=self._stage.device)
        host = torch.zeros(pool_shape, dtype=config.dtype, pin_memory=self._stage.device.type == "cuda")
        scattered = [(2 * block, count - 1 - block) for block in range(count)]
        num_bytes = pool.nbytes / 2
        self._measure(f"swap_out {count} blocks", lambda: self._backend.swap_blocks(pool, host, scattered), num_bytes)
        self._measure(f"swap_in {count} blocks", lambda: self._backend.swap_blocks(host, pool, scattered), num_bytes)
        apart = [(block, count + block) for block in range(count)]
        self._measure(f"copy {count} blocks", lambda: self._backend.copy_blocks(pool, apart), 2 * num_bytes)


def main() -> None:
    """Times everything."""
    stage = start(__doc__)
    config = shape(is_dry=stage.is_dry)
    table = OpTable(stage, config, get_backend(stage.device, config.dtype, "reference"))
    short, long = (32, 64) if stage.is_dry else (1024, 8192)
    counts = (1, 3) if stage.is_dry else (1, 8, 64, 256, 2048)
    table.linears(counts)
    table.elementwise(counts)
    for batch in (1, 3) if stage.is_dry else (1, 64, 256):
        table.attention(f"decode {batch} x {short}", [1] * batch, [short] * batch)
    mixed = [short // 16 * 4**power for power in range(4)]
    table.attention(f"decode {len(mixed)} mixed lengths to {max(mixed)}", [1] * len(mixed), mixed)
    for length in (2 * short, long):
        table.attention(f"prefill {length}", [length], [length])
    table.sampling(counts[:-1])
    table.blocks(4 if stage.is_dry else 64)


if __name__ == "__main__":
    main()
