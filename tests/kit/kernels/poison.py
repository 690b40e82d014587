"""Models of which one weight is not a number or infinite: what is told of each row, by our kernels and the reference.

    python -m tests.kit.kernels.poison

goes through each weight of each family in each dtype and instruction set, in pieces of 1 to 40 tokens; a test runs a
part of it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from blockyard_kernels.reference.backend import ReferenceBackend
from blockyard_kernels.reference.int8 import linear_int8
from blockyard_kernels.select import get_backend
from tests.kit.kernels.backends import COMPILED, Kernels, build_kernels
from tests.kit.kernels.quantized_reference import QuantizedReference
from tests.kit.kernels.step_runner import StepRunner
from tests.kit.kernels.tiny_models import VOCAB_SIZE, tiny_model
from worker_service.models.builder import build_decoder
from worker_service.models.model_config import read_config
from worker_service.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from blockyard_kernels.ops import Backend

FAMILIES = ("llama_bias", "llama_tied", "mistral", "qwen2_window", "qwen3")
VALUES = (float("nan"), float("inf"), float("-inf"))
CHUNKS = tuple(range(1, 41))
# The most tokens of a step that is replayed; more are computed op by op.
CAPTURED = 24
CPU = torch.device("cpu")
TOKEN_IDS = [(7919 * position + 5) % VOCAB_SIZE for position in range(max(CHUNKS))]
# Of a table of tokens one that is read; of all else an element in the middle.
POISONED_TOKEN = TOKEN_IDS[13]


class PoisonedFiles(WeightFiles):
    """Weight files, one of whose tensors holds one bad element."""

    def __init__(self, folder: Path, name: str, value: float) -> None:
        super().__init__(folder, lambda done_bytes, total_bytes: None)
        self._poisoned, self._value = name, value

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Reads a tensor."""
        tensor = super().read(name, shape)
        if name != self._poisoned:
            return tensor
        tensor = tensor.clone()
        row = POISONED_TOKEN if "embed_tokens" in name else len(tensor) // 2
        tensor.view(len(tensor), -1)[row, -1] = self._value
        return tensor


@dataclass(frozen=True, slots=True)
class Poison:
    """One bad element of one weight of a family, computed by some kernels."""

    family: str
    weight: str
    value: float
    kernels: Kernels
    quantization: str = "none"

    def load(self, backend: Backend) -> StepRunner:
        folder = tiny_model(self.family)
        config = read_config(folder, self.kernels.dtype)
        return StepRunner(build_decoder(config, backend, PoisonedFiles(folder, self.weight, self.value)), backend)

    def expected(self, chunks: Sequence[int]) -> list[bool]:
        """Returns of which numbers of tokens the reference finds the last finite, all computed beside each other."""
        backend = QuantizedReference(linear_int8) if self.quantization == "int8" else ReferenceBackend(CPU)
        results = self.load(backend).step([(chunk, TOKEN_IDS[:chunk]) for chunk in chunks])
        return [bool(logits[-1].isfinite().all()) for logits in results]

    def swallowed(self, chunks: Sequence[int] = CHUNKS) -> list[int]:
        """Returns the numbers of tokens of whose last our kernels, in one step, say anything else."""
        runner = self.load(get_backend(CPU, self.kernels.dtype, self.kernels.name, self.quantization))
        runner.capture(CAPTURED)
        found: list[int] = []
        for chunk, expected in zip(chunks, self.expected(chunks), strict=True):
            is_finite = bool(runner.run(chunk, TOKEN_IDS[:chunk], [chunk])[-1].isfinite().all())
            told = is_finite if runner.finite is None else runner.finite[-1]
            if (is_finite, told) != (expected, expected):
                found.append(chunk)
        return found

    def __str__(self) -> str:
        return f"{self.family} {self.weight} {self.value} {self.kernels} {self.quantization}"


def weights_of(family: str) -> list[str]:
    """Names the weights of a family's model."""
    return WeightFiles(tiny_model(family), lambda done_bytes, total_bytes: None).unread


def poisons(families: Sequence[str] = FAMILIES) -> Iterator[Poison]:
    """Lists every weight with every value on all kernels."""
    for family in families:
        for weight in weights_of(family):
            for value in VALUES:
                for kernels in COMPILED:
                    for quantization in ("none", "int8"):
                        yield Poison(family, weight, value, kernels, quantization)


def main() -> int:
    """The program; gives 1 where something was swallowed."""
    build_kernels()
    torch.set_num_threads(1)
    count, num_swallowed = 0, 0
    for poison in poisons(sys.argv[1:] or FAMILIES):
        chunks = poison.swallowed()
        count += 1
        num_swallowed += bool(chunks)
        if chunks:
            sys.stdout.write(f"{poison}: {chunks}\n")
    sys.stdout.write(f"{count} poisons in {len(CHUNKS)} pieces each, {num_swallowed} swallowed\n")
    return bool(num_swallowed)


if __name__ == "__main__":
    sys.exit(main())
