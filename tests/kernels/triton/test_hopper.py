"""The compiled kernels, on a machine without a GPU: they compile for one, fit it, and use its matrix instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

SCRIPT = """
import json, torch
from kernels.cuda.gemm import multiply
from tests.kit.kernels.hopper import SHARED_BYTES, compiling

def operands(rows, features, dtype):
    return torch.zeros(rows, features).to(dtype), torch.zeros(64, features).to(dtype)

found = []
with compiling() as compiled:
    for rows in (1, 32, 64, 200):
        for leaves, features in ((1, 4096), (8, 14336), (1, 70)):
            multiply(*operands(rows, features, torch.bfloat16), leaves=leaves, gated=leaves == 1)
            found.append(rows)
        multiply(*operands(rows, 512, torch.float16), torch.zeros(64, dtype=torch.float16), dtype=torch.float32)
        found.append(rows)
    multiply(*operands(1, 512, torch.float32))
    multiply(*operands(200, 512, torch.float32))
assert all(kernel.metadata.shared <= SHARED_BYTES for kernel in compiled)
texts = [kernel.asm["ptx"] for kernel in compiled[: len(found)]]
print(json.dumps([[rows, "wgmma.mma_async" in text, "mma.sync" in text] for rows, text in zip(found, texts)]))
"""


def test_products_compile_and_fit_and_use_the_matrix_instructions(tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    for rows, warp_group, warp in json.loads(ran.stdout):
        assert (warp_group, warp) == (rows >= 64, rows < 64), rows
