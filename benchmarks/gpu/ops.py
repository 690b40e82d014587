"""Stage `ops` of benchmarks/gpu_day.sh: each op at the shapes of one layer, beside what the machine could do at best.

What it could do is the longer of two: the op's bytes at the copy bandwidth, its products at the matrix rate, both
measured in the same run. Ops of a decode are timed in CUDA graphs, as a step has them. It fails where a prefill's
attention did not get the instructions of warp groups.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

import torch

from benchmarks.gpu.instructions import check, launched_kernels
from benchmarks.gpu.machine import name_of
from benchmarks.gpu.shapes import BLOCK_SIZE, block_tables, greedy, shape
from benchmarks.gpu.stage import Stage, start
from blockyard_kernels.cuda import gemm
from blockyard_kernels.cuda.backend import CudaBackend
from blockyard_kernels.cuda.linear import Method, Way
from blockyard_kernels.cuda.plan import StepLengths, make_work_list
from blockyard_kernels.ops import kv_pool_shape
from blockyard_kernels.shapes import AttentionShape, LinearSpec
from tests.kit.kernels.triton_interpreter import IS_INTERPRETED
from worker_service.models.random_weights import random_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from blockyard_kernels.cuda.linear import CudaLinear
    from worker_service.models.model_config import ModelConfig

# Copies of what is read are so large together that no cache of the device holds them.
UNCACHED_BYTES = 2**28


class OpTable:
    """Times ops of a network's shape, one after another."""

    def __init__(self, stage: Stage, config: ModelConfig) -> None:
        self._stage = stage
        self._config = config
        self._backend = CudaBackend(stage.device)
        self._invariant = CudaBackend(stage.device, invariant=True)
        self._in_8_bits = {f", {name}": CudaBackend(stage.device, quantization=name) for name in ("int8", "fp8")}
        self._heads = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5)

    def _random(self, *sizes: int) -> Tensor:
        return random_tensor(f"{sizes}", sizes, 1.0, self._config.dtype, self._stage.device)

    def linears(self, row_counts: Sequence[int]) -> None:
        """The five products: by cuBLAS; by our kernel, which keeps a row's bits; and by it, of weights in 8 bits."""
        config = self._config
        hidden, inner, queries = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        for name, num_out, num_in, gated in (
            ("qkv", queries + 2 * keys, hidden, False),
            ("output", hidden, queries, False),
            ("gate_up", 2 * inner, hidden, True),
            ("down", hidden, inner, False),
            ("head", config.vocab_size, hidden, False),
        ):
            weight, most = self._random(num_out, num_in), 512 if name == "head" else max(row_counts)
            for way, backend in {"": self._backend, ", our kernel": self._backend, **self._in_8_bits}.items():
                packed = cast("CudaLinear", backend.pack_linear([weight], spec=LinearSpec(gated=gated)))
                count = 1 if IS_INTERPRETED else -(-UNCACHED_BYTES // packed.num_bytes)
                again = [
                    cast("CudaLinear", backend.pack_linear([weight], spec=LinearSpec(gated=gated)))
                    for _ in range(count - 1)
                ]
                for each in (packed, *again) if way == ", our kernel" else ():
                    each.way = Way(Method.TILED)
                for rows in (rows for rows in row_counts if rows <= most):
                    self._linear(f"linear {name} {rows} rows{way}", rows, num_out, [packed, *again])

    def _linear(self, name: str, num_rows: int, num_out: int, copies: Sequence[CudaLinear]) -> None:
        """A product by weights that are alike, one after another, so that no cache has what is read."""
        num_in, dtype = copies[0].in_features, self._config.dtype
        rows = self._random(num_rows, num_in)
        rate = torch.int8 if copies[0].weight.dtype is torch.int8 else dtype
        work = {
            "bandwidth": copies[0].num_bytes + num_rows * (num_in + copies[0].out_features) * dtype.itemsize,
            name_of(rate): 2.0 * num_rows * num_out * num_in,
        }
        calls = len(copies)
        self._stage.measure(name, lambda: [each(rows) for each in copies], work, calls=calls, recorded=True)

    def elementwise(self, row_counts: Sequence[int]) -> None:
        """Norms and the activation."""
        config, size = self._config, self._config.dtype.itemsize
        weight = torch.ones(config.hidden_size, dtype=config.dtype, device=self._stage.device)
        for rows in row_counts:
            hidden, residual = self._random(rows, config.hidden_size), self._random(rows, config.hidden_size)
            self._stage.measure(
                f"rms_norm {rows} rows",
                lambda hidden=hidden, residual=residual: self._backend.rms_norm(hidden, weight, 1e-5, residual),
                {"bandwidth": 4 * hidden.numel() * size},
                recorded=True,
            )
            gates = self._random(rows, 2 * config.intermediate_size)
            self._stage.measure(
                f"silu_and_mul {rows} rows",
                lambda gates=gates: self._backend.silu_and_mul(gates),
                {"bandwidth": 1.5 * gates.numel() * size},
                recorded=True,
            )

    def attention(self, name: str, num_new: Sequence[int], lengths: Sequence[int]) -> None:
        """Makes a step's work list, writes its keys and values, and attends to them, in both modes."""
        config, heads, device = self._config, self._heads, self._stage.device
        tables = block_tables(lengths)
        pool_shape = kv_pool_shape(tables[-1][-1] + 1, 1, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        pool = torch.zeros(pool_shape, dtype=config.dtype, device=device)
        rows, width = sum(num_new), (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        qkv, rotary = self._random(rows, width), self._random(rows, 2, config.head_dim)
        query = self._random(rows, config.num_heads, config.head_dim)
        size = config.dtype.itemsize
        seen = sum(new * length - new * (new - 1) / 2 for new, length in zip(num_new, lengths, strict=True))
        work = {
            "bandwidth": sum(lengths) * 2 * config.num_kv_heads * config.head_dim * size,
            name_of(config.dtype): 4.0 * seen * config.num_heads * config.head_dim,
        }
        multiprocessors = gemm.num_multiprocessors(device)
        for backend in (self._backend, self._invariant):
            batch = backend.plan_attention(list(num_new), list(lengths), tables, BLOCK_SIZE)
            is_invariant = backend is self._invariant
            mode = ", invariant" if is_invariant else ""
            if not is_invariant:
                measured = batch
                self._stage.measure(
                    f"rotary_and_cache {name}",
                    lambda batch=measured: self._backend.rotary_and_cache(qkv, rotary, batch, pool, 0, heads),
                    {"bandwidth": 2 * qkv.numel() * size},
                    recorded=True,
                )
            on_device = StepLengths.of(batch)
            self._stage.measure(
                f"work list {name}{mode}",
                lambda lengths=on_device, invariant=is_invariant: make_work_list(
                    lengths, heads, BLOCK_SIZE, None, multiprocessors, invariant=invariant
                ),
                {},
                recorded=True,
            )
            self._stage.measure(
                f"paged_attention {name}{mode}",
                lambda backend=backend, batch=batch: backend.paged_attention(query, batch, pool, 0, heads),
                work,
                recorded=True,
            )

    def sampling(self, row_counts: Sequence[int]) -> None:
        """The likeliest token, and a draw from a nucleus."""
        for rows in row_counts:
            logits = random_tensor("logits", (rows, self._config.vocab_size), 3.0, torch.float32, self._stage.device)
            for name, temperature, top_p in (("greedy", 0.0, 1.0), ("top_p 0.9", 1.0, 0.9)):
                choices = greedy(rows)
                choices.temperatures[:], choices.top_p[:] = temperature, top_p
                self._stage.measure(
                    f"sample {name} {rows} rows",
                    lambda logits=logits, choices=choices: self._backend.sampling.launch_choose(logits, choices),
                    {"bandwidth": logits.nbytes},
                )

    def blocks(self, count: int) -> None:
        """Swaps and copies of whole blocks, all layers of them."""
        config = self._config
        pool_shape = kv_pool_shape(2 * count, config.num_layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        pool = torch.zeros(pool_shape, dtype=config.dtype, device=self._stage.device)
        host = torch.zeros(pool_shape, dtype=config.dtype, pin_memory=self._stage.device.type == "cuda")
        scattered = [(2 * block, count - 1 - block) for block in range(count)]
        num_bytes = pool.nbytes / 2
        for name, limit, source, target in (("out", "to_host", pool, host), ("in", "from_host", host, pool)):
            self._stage.measure(
                f"swap_{name} {count} blocks",
                lambda source=source, target=target: self._backend.swap_blocks(source, target, scattered),
                {limit: num_bytes},
            )
        apart = [(block, count + block) for block in range(count)]
        self._stage.measure(
            f"copy {count} blocks", lambda: self._backend.copy_blocks(pool, apart), {"bandwidth": 2 * num_bytes}
        )


def attend(table: OpTable, *, is_dry: bool) -> None:
    """Times attention in steps of all kinds."""
    short, long, repeats = (32, 12, 1) if is_dry else (1024, 8192, 8)
    for batch in (2,) if is_dry else (1, 64, 256):
        table.attention(f"decode {batch} x {short}", [1] * batch, [short] * batch)
    mixed = [short // 16 * 4**power for power in range(2 if is_dry else 5)] * repeats
    table.attention(f"decode {len(mixed)} of {min(mixed)} to {max(mixed)}", [1] * len(mixed), mixed)
    for length in (long,) if is_dry else (2 * short, long):
        table.attention(f"prefill {length}", [length], [length])


def main() -> bool:
    """Times everything; returns whether a prefill got its instructions."""
    stage = start(__doc__)
    table = OpTable(stage, shape(is_dry=stage.is_dry))
    counts = (3,) if stage.is_dry else (1, 64, 256, 2048)
    with launched_kernels() as kernels:
        # What matters most comes first.
        attend(table, is_dry=stage.is_dry)
        found, is_right = check(kernels.values())
        stage.keep("instructions", found)
        table.linears(counts)
        table.elementwise(counts)
        table.sampling(counts[:3])
        table.blocks(4 if stage.is_dry else 64)
        stage.keep("instructions", check(kernels.values())[0])
    return is_right


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
