"""Stage `steps` of benchmarks/gpu_day.sh: whole steps of the Llama-8B shape with random weights made on the device.

A step is the forward pass, the logits and the likeliest token of each sequence, on the host. `ideal_seconds` is the
longer of two: its bytes, weights and keys and values, at the copy bandwidth; its products at the matrix rate.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.shapes import shape
from benchmarks.gpu.stage import Stage, start
from kernels.ops import kv_pool_shape
from kernels.select import get_backend
from worker_service.models.decoder import build_decoder
from worker_service.models.random_weights import RandomWeights

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.ops import Backend
    from worker_service.models.decoder import DecoderModel

BLOCK_SIZE = 16
# Of what the device has left, so that a step has room.
POOL_SHARE = 0.7


def run_step(model: DecoderModel, backend: Backend, pool: Tensor, num_new: list[int], lengths: list[int]) -> None:
    """Computes one step. Sequences hold blocks of their own, from block 1 on."""
    tables: list[list[int]] = []
    first = 1
    for length in lengths:
        tables.append(list(range(first, first + -(-length // BLOCK_SIZE))))
        first = tables[-1][-1] + 1
    batch = backend.plan_attention(num_new, lengths, tables, BLOCK_SIZE, model.config.sliding_window)
    token_ids = torch.arange(sum(num_new), device=backend.device) % model.config.vocab_size
    hidden = model.forward(token_ids, batch, pool)
    last = torch.tensor(num_new, device=backend.device).cumsum(0) - 1
    model.compute_logits(hidden[last]).argmax(-1).cpu()


class Steps:
    """The model, and the largest pool that is needed and fits."""

    def __init__(self, stage: Stage) -> None:
        config = shape(is_dry=stage.is_dry)
        begin = time.perf_counter()
        self._backend = get_backend(stage.device, config.dtype, "reference")
        weights = RandomWeights(config, stage.device, lambda done_bytes, total_bytes: None)
        self.model = build_decoder(config, self._backend, weights)
        stage.synchronize()
        stage.keep(
            "load",
            {
                "seconds": time.perf_counter() - begin,
                "weights_bytes": self.model.parameter_bytes,
            },
        )
        self._stage = stage
        self._num_parameters = weights.num_elements - config.vocab_size * config.hidden_size
        self._pool: Tensor | None = None

    def _reserve(self, num_blocks: int) -> Tensor | None:
        """A pool of so many blocks, none where it does not fit."""
        config, device = self.model.config, self._stage.device
        pool_shape = kv_pool_shape(num_blocks, config.num_layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        num_bytes = torch.empty(pool_shape, dtype=config.dtype, device="meta").nbytes
        if self._pool is not None and len(self._pool) >= num_blocks:
            return self._pool
        self._pool = None
        if device.type == "cuda":
            torch.cuda.empty_cache()
            if num_bytes > POOL_SHARE * torch.cuda.mem_get_info(device)[0]:
                return None
        self._pool = torch.zeros(pool_shape, dtype=config.dtype, device=device)
        return self._pool

    def measure(self, name: str, num_new: list[int], lengths: list[int]) -> None:
        """Times one kind of step."""
        config, ceilings = self.model.config, self._stage.ceilings()
        pool = self._reserve(1 + sum(-(-length // BLOCK_SIZE) for length in lengths))
        if pool is None:
            self._stage.keep(name, {"error": "the blocks do not fit into this device's memory"})
            return
        facts: dict[str, float] = {"num_tokens": sum(num_new)}
        if ceilings:
            token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * config.dtype.itemsize
            num_bytes = self.model.parameter_bytes + sum(lengths) * token_bytes
            seen = sum(new * length - new * (new - 1) / 2 for new, length in zip(num_new, lengths, strict=True))
            flops = 2.0 * sum(num_new) * self._num_parameters
            flops += 4.0 * seen * config.num_layers * config.num_heads * config.head_dim
            facts["ideal_seconds"] = max(num_bytes / ceilings["bandwidth"], flops / ceilings["bfloat16"])
        self._stage.measure(name, lambda: run_step(self.model, self._backend, pool, num_new, lengths), **facts)


def main() -> None:
    """Times everything, the smallest first."""
    stage = start(__doc__)
    steps = Steps(stage)
    context = 32 if stage.is_dry else 1024
    for batch in (1, 3) if stage.is_dry else (1, 8, 64, 256):
        steps.measure(f"decode {batch} x {context}", [1] * batch, [context] * batch)
    for length in (48,) if stage.is_dry else (2048, 8192):
        steps.measure(f"prefill {length}", [length], [length])


if __name__ == "__main__":
    main()
