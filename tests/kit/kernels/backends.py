"""Every backend that computes on this machine's processor, and what a test must know to look into its pools.

One list, `KERNELS`: a test that holds for all of them is parametrized over it, so that a new instruction set is held to
all that the others are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from blockyard_kernels.cpu.backend import CpuBackend
from blockyard_kernels.cpu.build import EMULATED_SETS, build, find_compiler
from blockyard_kernels.cpu.build import INSTRUCTION_SETS as ALL_SETS
from blockyard_kernels.cpu.processors import supported_instruction_sets, this_processor
from blockyard_kernels.select import get_backend
from blockyard_kernels.shapes import AttentionShape, scale_width

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest
    from torch import Tensor

    from blockyard_kernels.ops import Backend

CPU = torch.device("cpu")
REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels that `--cpu-kernels` names, in one dtype."""

    name: str
    dtype: torch.dtype

    @property
    def backend(self) -> Backend:
        """The same object each time."""
        return get_backend(CPU, self.dtype, self.name) if self.name == REFERENCE else _built(self.name, self.dtype)

    def is_exact(self, shape: AttentionShape) -> bool:
        """Whether attention of these heads promises a row the same bits in every batch on this processor.

        From then on the backend computes it as its probe found best.
        """
        return _probed(self, shape)

    @property
    def is_reference(self) -> bool:
        """Whether torch computes."""
        return self.name == REFERENCE

    def __str__(self) -> str:
        return f"{self.name}-{str(self.dtype).removeprefix('torch.')}"


@cache
def _probed(kernels: Kernels, shape: AttentionShape) -> bool:
    return kernels.backend.probe([], shape)


@cache
def build_kernels() -> None:
    """Builds what `make setup` would, of the sources as they are, and the emulated sets."""
    compiler = find_compiler()
    assert compiler is not None, "the kernels' tests need a C++ compiler"
    build(compiler, (*ALL_SETS, *EMULATED_SETS))


def _built(name: str, dtype: torch.dtype) -> Backend:
    build_kernels()
    return get_backend(CPU, dtype, name)


INSTRUCTION_SETS = supported_instruction_sets()
"""Those of this processor, best first, and of others, their arithmetic spelled out."""
EMULATED = [choice.name for choice in this_processor().supported() if choice.emulates]
BEST = next((choice.name for choice in this_processor().chosen()), REFERENCE)
"""What a worker takes here by itself, once it is built."""
COMPILED = [
    Kernels(name, dtype)
    for name in INSTRUCTION_SETS
    for dtype in (torch.float32, torch.bfloat16)
    # What is emulated is bfloat16's alone.
    if name not in EMULATED or dtype == torch.bfloat16
]
"""Our own kernels."""
REFERENCES = [Kernels(REFERENCE, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
KERNELS = [*REFERENCES, *COMPILED]


def in_dtype(kernels: Iterable[Kernels], *dtypes: torch.dtype) -> list[Kernels]:
    """Those of some dtypes."""
    return [each for each in kernels if each.dtype in dtypes]


def store(backend: Backend, pool: Tensor, layer: int, tables: list[list[int]], keys_values: list[Tensor]) -> None:
    """Writes whole sequences' keys and values, each [2, length, K, D], to their blocks, by the backend's own op.

    The last block of each is cleared past the sequence's end.
    """
    num_kv_heads, block_size, head_dim = *pool.shape[3:5], keys_values[0].shape[3]
    lengths = [each.shape[1] for each in keys_values]
    batch = backend.plan_attention(lengths, lengths, tables, block_size)
    # Queries are of no matter; the angle is 0.
    rows = torch.cat([each.transpose(0, 1).flatten(1) for each in keys_values])
    qkv = torch.cat([rows.new_zeros(len(rows), num_kv_heads * head_dim), rows], dim=1)
    rotary = torch.stack([rows.new_ones(len(rows), head_dim), rows.new_zeros(len(rows), head_dim)], dim=1)
    shape = AttentionShape(num_kv_heads, num_kv_heads, head_dim, 1.0)
    backend.rotary_and_cache(qkv, rotary, batch, pool, layer, shape)


def read_layer(kernels: Kernels, pool: Tensor, layer: int) -> Tensor:
    """A layer of a pool in the shape of `blockyard_kernels.ops`: [blocks, 2, K, block_size, D], whatever the tile.

    Ours lays keys out in words of 4 bytes [D words][block_size], values in [block_size words][D]; scales lie behind.
    """
    plain = pool[:, layer]
    if kernels.is_reference:
        return plain
    num_blocks, _, num_kv_heads, block_size, width = plain.shape
    scale, values_of_word, heads = scale_width(pool.dtype), 4 // pool.itemsize, (num_blocks, num_kv_heads)
    head_dim = width - scale
    numbers, scales = plain.flatten(3).split([block_size * head_dim, block_size * scale], -1)
    keys = numbers[:, 0].reshape(*heads, head_dim // values_of_word, block_size, values_of_word)
    values = numbers[:, 1].reshape(*heads, block_size // values_of_word, head_dim, values_of_word)
    both = torch.stack(
        [keys.transpose(2, 3).flatten(3), values.transpose(3, 4).reshape(*heads, block_size, head_dim)], 1
    )
    return torch.cat([both, scales.reshape(*plain.shape[:4], scale)], -1)


def become_another_build(patch: pytest.MonkeyPatch) -> None:
    """Gives CPU kernels that are made from now on another build's identity: a machine may have one instruction set."""
    patch.setattr(CpuBackend, "identity", property(lambda _: "another build", lambda _, __: None), raising=False)
