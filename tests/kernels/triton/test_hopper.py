"""The compiled kernels, on a machine without a GPU: they compile for one, fit it, and use its matrix instructions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

SCRIPT = """
import torch
from blockyard_kernels.cuda.epilogue import PLAIN, Epilogue, finish
from blockyard_kernels.cuda.gemm import multiply
from blockyard_kernels.cuda.quantized import FP8, INT8, quantize
from blockyard_kernels.shapes import Activation, LogitTransform
from tests.kit.kernels.hopper import SHARED_BYTES, compiling

def operands(rows, features, dtype):
    return torch.zeros(rows, features).to(dtype), torch.zeros(64, features).to(dtype)

GATED = Epilogue(True, Activation.SILU)
found = []
with compiling() as compiled:
    for rows in (1, 32, 64, 300):
        for leaves, features in ((1, 4096), (8, 14336), (1, 70))[: 2 if rows == 32 else 3]:
            multiply(*operands(rows, features, torch.bfloat16), leaves=leaves, epilogue=GATED if leaves == 1 else PLAIN)
            found.append((rows, False))
        for leaves in (1, 2)[: 1 + (rows == 64)]:
            scales = torch.zeros(rows, leaves), torch.zeros(64, leaves)
            multiply(*operands(rows, 4096, torch.int8), leaves=leaves, dtype=torch.bfloat16, scales=scales)
            found.append((rows, True))
        left, right = operands(rows, 4096, torch.bfloat16)
        multiply(left, right.to(torch.float8_e4m3fn), scales=(None, torch.zeros(64, 1)))
        found.append((rows, True))
    for rows, epilogue in (
        (200, PLAIN), (1, Epilogue(True, Activation.GELU_TANH)), (300, Epilogue(False, Activation.GELU_ERF)),
        (16, Epilogue(False, Activation.RELU2)), (300, Epilogue(logits=LogitTransform(0.7, 30.0))),
    ):
        bias = torch.zeros(64, dtype=torch.float16)
        multiply(*operands(rows, 512, torch.float16), bias, dtype=torch.float32, epilogue=epilogue)
        found.append((rows, False))
    multiply(*operands(1, 512, torch.float32))
    multiply(*operands(200, 512, torch.float32))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for into in (INT8, FP8):
            quantize(operands(3, 14336, dtype)[0], into, 1)
        finish(torch.zeros(3, 512), torch.zeros(512, dtype=dtype), dtype=dtype, epilogue=GATED)
    finish(torch.zeros(3, 512, dtype=dtype), None, dtype=dtype, epilogue=Epilogue(False, Activation.GELU_ERF))
    finish(torch.zeros(3, 512), None, dtype=torch.float32, epilogue=Epilogue(logits=LogitTransform(0.7, 30.0)))
assert all(kernel.metadata.shared <= SHARED_BYTES for kernel in compiled)
for (rows, is_scaled), kernel in zip(found, compiled):
    text = kernel.asm["ptx"]
    assert ("wgmma.mma_async" in text) == (rows >= 64), rows
    assert ("mma.sync" in text) == (rows < 64), rows
    # Scaling a leaf and adding it would be one instruction that rounds once.
    assert kernel.metadata.enable_fp_fusion != is_scaled
    assert not (is_scaled and "fma.rn.f32" in text)
assert not any("fma.rn.f32" in kernel.asm["ptx"] for kernel in compiled if kernel.metadata.name == "_quantize")
"""

ROWS_SCRIPT = """
from dataclasses import replace
import torch
from blockyard_kernels import planning
from blockyard_kernels.cuda import elementwise
from blockyard_kernels.cuda.quantized import INT8
from blockyard_kernels.cuda.rows import norms, rotary
from blockyard_kernels.cuda.tokens import choice, last_tokens, logprobs
from blockyard_kernels.lora import VirtualRows
from blockyard_kernels.ops import kv_pool_shape
from blockyard_kernels.shapes import AttentionShape, QueryKeyNorms
from tests.kit.kernels.hopper import SHARED_BYTES, compiling

torch.Tensor.new_empty = torch.Tensor.new_zeros  # what nothing writes is read as indexes
SHAPE, CPU = AttentionShape(4, 2, 128, 0.1), torch.device("cpu")
with compiling() as compiled:
    for num_rows in (1, 5):
        rows, wide = torch.zeros(num_rows, 4096).bfloat16(), torch.zeros(4096)
        norms.norm(rows, rows[0], 1e-5)
        norms.norm(rows, rows[0], 1e-5, rows, into=INT8)
        norms.norm(rows, wide, 1e-5, rows, 0.2, INT8, bias=wide, is_centred=True)
        norms.norm(rows, None, 1e-5, rows, 0.2)
        norms.add_normed(rows, wide, 1e-5, rows)
        norms.norm_in_place(rows[:, :1024], rows[0, :1024], 1e-5)
        norms.add(rows, rows, 0.2)
        elementwise.silu_and_mul(rows)
        elementwise.embedding(torch.zeros(num_rows, dtype=torch.int64), rows, scale=60.0)
        elementwise.embedding(torch.zeros(num_rows, dtype=torch.int64), rows, virtual=VirtualRows(1 << 30, rows))
        batch = planning.plan([num_rows], [num_rows], [[0]], 16, None, CPU)
        for head_dim, rotated, dtype in (
            (128, 128, None), (128, 128, torch.bfloat16), (256, 256, torch.float32), (80, 32, torch.float32),
            (64, 0, None),
        ):
            shape, pool = replace(SHAPE, head_dim=head_dim), torch.zeros(kv_pool_shape(2, 1, 2, 16, head_dim))
            weights = dtype and QueryKeyNorms(torch.ones(head_dim).to(dtype), torch.ones(head_dim).to(dtype), 1e-5)
            angles = torch.zeros(num_rows, 2, rotated).bfloat16() if rotated else None
            qkv = torch.zeros(num_rows, 8 * head_dim).bfloat16()
            rotary.rotary_and_cache(qkv, angles, batch, pool.bfloat16(), 0, shape, weights)
        logits, table = torch.zeros(num_rows, 128256 if num_rows > 1 else 1), torch.zeros(num_rows, 8).int()
        for drawn, filtered in ((False, False), (True, False), (True, True))[-num_rows:]:
            choice.choose(logits, table, drawn=drawn, filtered=filtered)
        ids = torch.zeros(num_rows, dtype=torch.int64)
        logprobs.token_logprobs(logits, ids, ids, 1)
        last_tokens.put_last_tokens(ids, ids, last_tokens.take_last_tokens(ids, ids))
assert len(compiled) == 2 * 15 + 23, len(compiled)
exact = ("_norm", "_add_normed", "_add", "_rotary_and_cache")
assert not any("fma.rn.f32" in kernel.asm["ptx"] for kernel in compiled if kernel.metadata.name in exact)
assert all(kernel.metadata.shared <= SHARED_BYTES for kernel in compiled)
"""

LORA_SCRIPT = """
import numpy as np
import torch
from blockyard_kernels.cuda.backend import CudaBackend
from blockyard_kernels.lora import LoraRows
from blockyard_kernels.shapes import Activation, LinearSpec
from tests.kit.kernels.hopper import SHARED_BYTES, compiling

torch.Tensor.new_empty = torch.Tensor.new_zeros
with compiling() as compiled:
    for dtype, features, num_rows, gated, leaves in (
        (torch.bfloat16, 4096, 6144, False, 1), (torch.float16, 4096, 28672, True, 1),
        (torch.bfloat16, 14336, 4096, False, 8), (torch.float32, 70, 40, False, 1),
    ):
        backend, kind = CudaBackend(torch.device("cpu"), invariant=True), Activation.GELU_TANH if gated else None
        weight = torch.zeros(num_rows, features, dtype=dtype)
        packed = backend.pack_linear(weight, spec=LinearSpec(gated, kind, leaves=leaves))
        backend.lora.make_room(packed, 5, 48)
        room = backend.lora.find(packed)
        hidden, lora = torch.zeros(20, features, dtype=dtype), LoraRows(np.arange(20, dtype=np.int32) % 5)
        sums = torch.zeros(20, num_rows, dtype=dtype)
        result = torch.zeros(20, num_rows // 2, dtype=dtype) if gated else sums
        room.expand(sums, room.shrink(hidden, lora), lora, result)
assert [kernel.metadata.name for kernel in compiled] == ["_shrink", "_expand"] * 4
assert all(kernel.metadata.shared <= SHARED_BYTES for kernel in compiled)
for kernel in compiled[:6]:
    text = kernel.asm["ptx"]
    # Tiles of 16 rows, with or without others beside them: one kind of instruction for all.
    assert "mma.sync" in text and "wgmma.mma_async" not in text
    # Numbers of slots are read 16 bytes at a time, though what is behind the first factor is only known there.
    assert "cp.async.cg" in text and "cp.async.ca" not in text
"""

ATTENTION_SCRIPT = """
import torch
from blockyard_kernels import planning
from blockyard_kernels.cuda.attention import paged_attention
from blockyard_kernels.ops import kv_pool_shape
from blockyard_kernels.shapes import AttentionShape
from tests.kit.kernels.hopper import SHARED_BYTES, compiling

batch = planning.plan([1, 40], [900, 40], [list(range(57)), [0, 1, 2]], 16, None, torch.device("cpu"))
with compiling() as compiled:
    for head_dim, dtype, invariant, softcap, sinks in (
        (128, torch.bfloat16, False, 0.0, None), (256, torch.float16, True, 50.0, torch.zeros(8)),
        (64, torch.bfloat16, False, 0.0, torch.zeros(8)), (256, torch.float32, False, 50.0, None),
    ):
        query = torch.zeros(41, 8, head_dim, dtype=dtype)
        pool = torch.zeros(kv_pool_shape(57, 1, 2, 16, head_dim), dtype=dtype)
        shape = AttentionShape(8, 2, head_dim, 0.1, softcap)
        options = {"invariant": invariant, "num_multiprocessors": 132}
        paged_attention(query, batch, pool, 0, shape, None, sinks, **options)
assert all(kernel.metadata.shared <= SHARED_BYTES for kernel in compiled)
texts = [kernel.asm["ptx"] for kernel in compiled if kernel.metadata.name == "_attend_items"]
found = [("wgmma.mma_async" in text, "mma.sync" in text) for text in texts]
assert found[:2] == [(False, True), (True, False)], "decodes and prefills"
assert found[2:4] == [(True, False), (True, False)], "the same instructions for all rows where it is invariant"
assert found[4:6] == [(False, True), (True, False)], "decodes and prefills"
assert found[6:] == [(False, False), (False, False)], "float32, of which each product is exact"

from benchmarks.gpu.instructions import check, describe

attending = [kernel for kernel in compiled if kernel.metadata.name == "_attend_items"]
decode, prefill = describe(attending[:2])
assert decode["HMMA"] and not decode["HGMMA"] and prefill["HGMMA"] and not prefill["HMMA"]
assert check(attending[:2])[1] and not check(attending[:1])[1]
"""


def run(script: str) -> None:
    """Runs a script in a process that interprets nothing. What is compiled stays: Triton compiles what has changed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(ROOT / ".triton_cache"), "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_products_compile_and_fit_and_use_the_matrix_instructions():
    run(SCRIPT)


def test_the_other_ops_compile_and_fit():
    """Of one row and one token too: Triton takes a 1 for a constant."""
    run(ROWS_SCRIPT)


def test_products_of_adapters_compile_and_fit_and_use_the_matrix_instructions():
    run(LORA_SCRIPT)


def test_attention_compiles_and_fits_and_uses_the_matrix_instructions():
    run(ATTENTION_SCRIPT)
