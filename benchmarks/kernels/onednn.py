"""The best that oneDNN, by way of PyTorch, reaches on the matrices of a model's layers, packed for it beforehand.

    python benchmarks/kernels/onednn.py benchmarks/models/llama-135m [--dtype bfloat16]

It stands beside the ceiling of the processor: how much of that a good library reaches. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.kit.ideal import Shape

NUM_ROWS = (512, 1024, 2048)
NUM_PASSES = 5


class PackedProduct:
    """Random rows by a random matrix [out, in], packed for so many rows.

    PyTorch packs bfloat16 only on processors with AVX512. Elsewhere its ordinary product is measured.
    """

    def __init__(self, num_rows: int, matrix: tuple[int, int], dtype: torch.dtype) -> None:
        self._weight = torch.randn(matrix).to(dtype) * 0.02
        self._rows = torch.randn(num_rows, matrix[1]).to(dtype)
        self._is_packed = dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if self._is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, num_rows)

    @torch.inference_mode()
    def run(self) -> None:
        """Computes it once."""
        if self._is_packed:
            torch.ops.mkldnn._linear_pointwise(self._rows, self._weight, None, "none", [], "")
        else:
            torch.nn.functional.linear(self._rows, self._weight)


def product_seconds(num_rows: int, matrix: tuple[int, int], dtype: torch.dtype) -> float:
    """The best time of a product of so many rows with a packed matrix [out, in]."""
    product = PackedProduct(num_rows, matrix, dtype)
    seconds: list[float] = []
    for _ in range(1 + NUM_PASSES):
        begin = time.perf_counter()
        product.run()
        seconds.append(time.perf_counter() - begin)
    # The first one prepares.
    return min(seconds[1:])


def measure(shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    """Operations a second: of the best single product, and of all products of a layer at the best number of rows."""
    best, layer = 0.0, 0.0
    for num_rows in NUM_ROWS:
        total_operations, total_seconds = 0.0, 0.0
        for matrix in shape.layer_matrices:
            operations, seconds = 2.0 * num_rows * matrix[0] * matrix[1], product_seconds(num_rows, matrix, dtype)
            best = max(best, operations / seconds)
            total_operations, total_seconds = total_operations + operations, total_seconds + seconds
        layer = max(layer, total_operations / total_seconds)
    return {"best_product": best, "whole_layer": layer}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model's folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--num-threads", type=int, default=0, help="0: as PyTorch chooses")
    options = parser.parse_args()
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    print(json.dumps(measure(Shape.read(options.model), getattr(torch, options.dtype))))


if __name__ == "__main__":
    main()
