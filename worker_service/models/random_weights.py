"""Random weights in place of a model folder's, for benchmarks, tests and plans that need only shapes.

Each tensor is a function of the seed, its name and its shape: the two halves of each word of Philox4x32-10, uniform
around zero. The device computes them with integers and one multiplication, so a CPU and a GPU make the same bits.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch

from blockyard.capacity.weights import count_elements
from blockyard_kernels.reference.sampling import philox
from worker_service.models.mlp.tensors import BLOCKS
from worker_service.models.weight_files import Numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from worker_service.models.model_config import ModelConfig

# A counter gives four words of two values each.
VALUES_PER_COUNTER = 8
# Counters that are computed at a time: each word takes 8 bytes meanwhile.
PIECE = 2**20
# The standard deviation of a bias. A weight's standard deviation is chosen so that products keep their rows' size.
BIAS_SPREAD = 0.02
HALF = 2**16
# Optional tensors of quantized modules, which are not made.
OPTIONAL = (".weight_shape", ".weight_zero_point", ".weight_g_idx", ".g_idx")
# The standard deviation of levels, as a part of all of them; zero points of 7 or 8, in words.
LEVEL_SPREAD, MIDDLE_ZEROS = 12**-0.5, 0x77777777


class RandomWeights:
    """All tensors of a network, by name, made when they are read. Same interface as `WeightFiles`."""

    def __init__(
        self, config: ModelConfig, device: torch.device, on_progress: Callable[[int, int], None], seed: int = 0
    ) -> None:
        self.num_elements = count_elements(config)
        """Numbers in all tensors."""
        self.unread: list[str] = []
        self.tensors: dict[str, tuple[int, ...]] = {}
        """The shapes of the tensors that were made or passed over, by name, in this order."""
        self._config = config
        self._device = device
        self._on_progress = on_progress
        self._seed = seed
        self._num_made = 0
        self._digest = hashlib.sha256(b"random weights 1\n")

    def __contains__(self, name: str) -> bool:
        # Tensors that may be quantized are made as plain numbers.
        is_tied_head = self._config.head.is_tied and name in {f"{head}.weight" for head in self._config.names.heads}
        is_left_out = name.endswith(BLOCKS) or (self._config.stored is not None and name.endswith(OPTIONAL))
        return not is_tied_head and not is_left_out

    def read(self, name: str, shape: Sequence[int], numbers: Numbers = Numbers.FLOATS) -> Tensor:
        """Makes a tensor on the device, in the model's dtype, or of whole numbers."""
        dtype = self._config.dtype
        if numbers is not Numbers.FLOATS:
            tensor = self._read_quantized(name, shape, numbers)
        elif len(shape) == 1 and name.endswith(".weight"):
            tensor = torch.ones(*shape, dtype=dtype, device=self._device)
        else:
            spread = BIAS_SPREAD if len(shape) == 1 else shape[-1] ** -0.5
            tensor = random_tensor(f"{self._seed} {name}", shape, spread, dtype, self._device)
        self.pass_over(name, shape)
        return tensor

    def _read_quantized(self, name: str, shape: Sequence[int], numbers: Numbers) -> Tensor:
        """Makes levels of all values, scales that keep the size of rows in products, and middle zero points."""
        stored = self._config.stored
        assert stored is not None
        match numbers:
            case Numbers.ZEROS:
                return torch.full(tuple(shape), MIDDLE_ZEROS, dtype=torch.int32)
            case Numbers.PLACES:
                return torch.arange(*shape) // (stored.group or shape[0])
            case Numbers.SCALES:
                spread = LEVEL_SPREAD * 2**stored.bits * self._config.hidden_size**0.5
                return (1 + random_tensor(f"{self._seed} {name}", shape, 0.1, torch.float32, self._device)) / spread
            case _:
                count = math.prod(shape) * (4 if numbers is Numbers.WORDS else 1)
                values = random_tensor(f"{self._seed} {name}", [count], 12**-0.5, torch.float32, self._device)
                levels = (values * 256).floor().clamp(-128, 127).to(torch.int8)
                return (levels.view(torch.int32) if numbers is Numbers.WORDS else levels).view(*shape)

    def pass_over(self, name: str, shape: Sequence[int]) -> None:
        """Takes note of a tensor that another process makes."""
        self.tensors[name] = tuple(shape)
        dtype = self._config.dtype
        self._digest.update(f"{self._seed} {name} {list(shape)} {dtype}\n".encode())
        self._num_made += math.prod(shape)
        self._on_progress(self._num_made * dtype.itemsize, self.num_elements * dtype.itemsize)

    def check(self, tensors: Mapping[str, Sequence[int]]) -> None:
        """Does nothing: every tensor can be made."""

    def finish(self) -> str:
        """Returns the digest of the inputs from which all tensors were made, in hex."""
        return self._digest.hexdigest()


def random_tensor(name: str, shape: Sequence[int], spread: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Makes a tensor of uniform numbers around zero with this standard deviation, as a function of the name."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
    low, high = (torch.tensor(part, device=device) for part in (key & 0xFFFFFFFF, key >> 32))
    tensor = torch.empty(math.prod(shape), dtype=dtype, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    # The distance of neighbouring values. A value is a whole number and a half, exact in float32, times this.
    unit = spread * math.sqrt(12) / HALF
    for first in range(0, tensor.numel(), PIECE * VALUES_PER_COUNTER):
        part = tensor[first : first + PIECE * VALUES_PER_COUNTER]
        start = first // VALUES_PER_COUNTER
        counters = torch.arange(start, start + -(-part.numel() // VALUES_PER_COUNTER), device=device)
        words = torch.stack(philox((counters & 0xFFFFFFFF, counters >> 32, zero, zero), (low, high)), 1)
        halves = torch.stack([words & (HALF - 1), words >> 16], 2).flatten()[: part.numel()]
        part.copy_((halves.float() - (HALF - 1) / 2) * unit)
    return tensor.view(*shape)
