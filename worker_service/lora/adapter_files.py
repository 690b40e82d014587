"""Reads a LoRA adapter's folder: the factors of each module. Knows names of modules, and nothing of kernels."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blockyard.model_config.fields import unusable
from worker_service.models.weight_files import STORED_DTYPES, TensorEntry, map_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from worker_service.lora.peft_folder import PeftFolder

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings of an adapter that determine its rank and scale."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    ranks: dict[str, int]
    alphas: dict[str, float]

    def scale_of(self, module: str) -> tuple[int, float]:
        """Returns a module's rank and its scale."""
        rank, alpha = _match(self.ranks, module, self.rank), _match(self.alphas, module, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


class AdapterFiles:
    """A LoRA adapter's folder. Raises BlockyardError MODEL_NOT_LOADED for any fault of the folder."""

    def __init__(self, folder: PeftFolder, max_rank: int) -> None:
        self._folder = folder
        self._path = folder.weights_path
        self.config = _read_config(folder)
        self._pairs = self._find_pairs(max_rank)

    @property
    def modules(self) -> dict[str, tuple[int, int, int]]:
        """The modules that the adapter changes, each with its rank, inputs and outputs."""
        return {name: (a.shape[0], a.shape[1], b.shape[0]) for name, (a, b) in self._pairs.items()}

    def read(self, module: str) -> tuple[Tensor, Tensor]:
        """Reads the factors of a module: A [rank, in], and B [out, rank] times the scale, in float32."""
        inner, outer = (map_tensor(entry, reads_ahead=True).float() for entry in self._pairs[module])
        return inner, outer * self.config.scale_of(module)[1]

    def _find_pairs(self, max_rank: int) -> dict[str, tuple[TensorEntry, TensorEntry]]:
        found: dict[str, dict[str, TensorEntry]] = {}
        for name, entry in self._folder.header().items():
            match = _TENSOR.fullmatch(name)
            if match is None or entry.stored_dtype not in STORED_DTYPES:
                raise unusable(f"{self._path} has a tensor that is not served: {name}, of {entry.stored_dtype}")
            found.setdefault(match["module"], {})[match["factor"]] = entry
        return dict(self._pairs_of(found, max_rank))

    def _pairs_of(
        self, found: dict[str, dict[str, TensorEntry]], max_rank: int
    ) -> Iterator[tuple[str, tuple[TensorEntry, TensorEntry]]]:
        for module, factors in sorted(found.items()):
            if len(factors) < 2:
                raise unusable(f"{self._path}: {module} has one factor alone")
            inner, outer = factors["A"], factors["B"]
            rank = self.config.scale_of(module)[0]
            if len(inner.shape) != 2 or len(outer.shape) != 2 or {inner.shape[0], outer.shape[1]} != {rank}:
                shapes = f"{list(inner.shape)} and {list(outer.shape)}"
                raise unusable(f"{self._path}: {module} has factors {shapes}, and its rank is {rank}")
            if rank > max_rank:
                raise unusable(f"{self._path}: {module} has rank {rank}, more than --max-lora-rank {max_rank}")
            yield module, (inner, outer)


def _read_config(folder: PeftFolder) -> AdapterConfig:
    fields = folder.fields
    rank: Any = fields.get("r")
    alpha: Any = fields.get("lora_alpha")
    if not _is_positive(rank, int) or not _is_positive(alpha, (int, float)):
        raise unusable(f"{folder.config_path}: r and lora_alpha must be numbers above 0, not {rank!r} and {alpha!r}")
    ranks = _pattern(folder, "rank_pattern", int)
    alphas = _pattern(folder, "alpha_pattern", (int, float))
    return AdapterConfig(rank, alpha, bool(fields.get("use_rslora")), ranks, alphas)


def _pattern(folder: PeftFolder, name: str, kind: Any) -> dict[str, Any]:
    pattern = folder.fields.get(name) or {}
    if not isinstance(pattern, dict) or not all(_is_positive(value, kind) for value in pattern.values()):
        raise unusable(f"{folder.config_path}: {name} must map names of modules to numbers above 0")
    return pattern


def _is_positive(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and 0 < value < math.inf


def _match(pattern: dict[str, Any], module: str, default: Any) -> Any:
    """Finds a module's value as PEFT does: by its whole name or by the last parts of its name."""
    for key, value in pattern.items():
        # Regular expressions from files are not run; PEFT's own tools write names and last parts of names.
        if module == key.removeprefix("^") or module.endswith("." + key):
            return value
    return default
