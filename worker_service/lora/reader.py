"""Reads adapters for one loaded network: checks them against it, cuts them for this rank and packs them.

Runs in the loader's thread, while steps are computed. Knows the network's sites, and no cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from blockyard.model_config.fields import unusable
from worker_service.lora.adapter import AdapterWeights, LoraRequest
from worker_service.lora.adapter_files import AdapterFiles
from worker_service.lora.peft_folder import PROMPT_TUNING, PeftFolder
from worker_service.models.weight_files import STORED_DTYPES, map_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from blockyard.contract.workers import LoraLimits
    from blockyard.model_config.decoder_config import Layer
    from blockyard_kernels.arena import Arena
    from blockyard_kernels.lora import LoraOps, PackedLora
    from worker_service.models.decoder import DecoderModel
    from worker_service.models.projections import Projection

TENSOR = "prompt_embeddings"


class AdapterReader:
    """Reads adapters for one network, and gives the network its slots."""

    def __init__(
        self, model: DecoderModel, ops: LoraOps | None, limits: LoraLimits, arena: Arena | None = None
    ) -> None:
        """Makes the network's slots.

        Args:
            model: the network.
            ops: the LoRA ops of the backend; None if the limits allow only soft prompts (rank 0).
            limits: the limits of adapters.
            arena: the arena for slots of factors, if they take memory; None: the backend allocates it.
        """
        self.arena = arena
        self._ops = ops
        self._limits = limits
        self._model = model
        self._sites: tuple[Projection, ...] = ()
        max_lora_bytes = self._make_room()
        max_tokens = limits.max_prompt_adapter_tokens
        prompts = self._prompts = model.make_virtual_rows(limits.max_loras * max_tokens) if max_tokens else None
        # On a CPU the rows of soft prompts are also counted outside the slots; on other devices they are only in slots.
        held = 0 if prompts is None or prompts.device.type != "cpu" else prompts.nbytes // limits.max_loras
        self.max_adapter_bytes = max(max_lora_bytes, held)
        """Bytes of device memory that the largest adapter takes outside of the slots."""

    def _make_room(self) -> int:
        self._layers = self._model.layers
        max_rank = self._limits.max_lora_rank
        if self._ops is None or not max_rank:
            return 0
        self._sites = find_sites(self._model)
        return sum(
            self._ops.make_room(site.packed, self._limits.max_loras, max_rank * len(site.modules), self.arena)
            for site in self._sites
        )

    def read(self, request: LoraRequest, path: Path, root: Path | None = None) -> AdapterWeights:
        """Reads and packs an adapter; raises BlockyardError MODEL_NOT_LOADED with the fault of its files.

        `root`: as in `PeftFolder`.
        """
        folder = PeftFolder(path, root)
        return self._read_prompt(request, folder) if folder.kind == PROMPT_TUNING else self._read_lora(request, folder)

    def _read_prompt(self, request: LoraRequest, folder: PeftFolder) -> AdapterWeights:
        config, max_tokens = self._model.config, self._limits.max_prompt_adapter_tokens
        if not max_tokens:
            raise unusable(f"{folder.path} is a soft prompt: start with --max-prompt-adapter-tokens for it")
        prompt = read_soft_prompt(folder, config.hidden_size, config.dtype, max_tokens)
        num_tokens = len(prompt)
        kept = None if self._prompts is None else prompt
        return AdapterWeights(request, 0, (), folder.digest(), num_virtual_tokens=num_tokens, prompt=kept)

    def _read_lora(self, request: LoraRequest, folder: PeftFolder) -> AdapterWeights:
        if not self._sites:
            raise unusable(f"{folder.path} is a LoRA adapter: start without --max-lora-rank 0 for it")
        files = AdapterFiles(folder, self._limits.max_lora_rank)
        self._check(files, folder.path)
        factors = tuple(self._pack(files, site) for site in self._sites)
        rank = max(sizes[0] for sizes in files.modules.values())
        targets = {name.rpartition(".")[2] for name in files.modules}
        return AdapterWeights(request, rank, tuple(sorted(targets)), folder.digest(), factors)

    def _pack(self, files: AdapterFiles, site: Projection) -> PackedLora | None:
        assert self._ops is not None, "there are sites"
        names = [module.name for module in site.modules if module.name in files.modules]
        joined = join_factors(site, {name: files.read(name) for name in names})
        return None if joined is None else self._ops.pack(site.packed, *joined)

    def _check(self, files: AdapterFiles, folder: Path) -> None:
        shapes, others = module_shapes(self._model)
        for name, (_, in_features, out_features) in files.modules.items():
            if name not in shapes and name.startswith(others):
                continue
            if name not in shapes:
                raise unusable(f"{folder}: {name} is no module that adapters can change in this model")
            if shapes[name] != (in_features, out_features):
                there, here = f"{out_features} x {in_features}", " x ".join(map(str, reversed(shapes[name])))
                raise unusable(f"{folder}: {name} is {there} and the model's {here}: it belongs to another model")

    def write(self, slot: int, adapter: AdapterWeights | None) -> None:
        """Puts an adapter into a slot, or empties the slot (None). Runs in the device thread."""
        if self._layers is not self._model.layers:
            # The weights were reloaded by a backend that packs them at new addresses.
            self._make_room()
        factors = adapter.factors if adapter else ()
        for index, site in enumerate(self._sites):
            assert self._ops is not None, "there are sites"
            self._ops.write(site.packed, slot, factors[index] if factors else None)
        if self._prompts is not None and adapter is not None and adapter.prompt is not None:
            first = slot * self._limits.max_prompt_adapter_tokens
            self._prompts[first : first + adapter.num_virtual_tokens] = adapter.prompt


def join_factors(projection: Projection, factors: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor] | None:
    """Joins the factors of some modules, each (A [rank, in], B [out, rank]); None: none is of this weight.

    A packed weight may hold several modules of a checkpoint (q, k and v): their factors are joined, with zeros where
    one module's numbers meet another's rows.
    """
    found = [(module, *factors[module.name]) for module in projection.modules if module.name in factors]
    if not found:
        return None
    width = sum(len(inner) for _, inner, _ in found)
    num_rows = [module.num_rows for module in projection.modules]
    expand = found[0][2].new_zeros(sum(num_rows), width)
    column = 0
    for module, inner, outer in found:
        row = sum(num_rows[: projection.modules.index(module)])
        expand[row : row + module.num_rows, column : column + len(inner)] = module.take(outer)
        column += len(inner)
    return torch.cat([inner[:, module.columns] for module, inner, _ in found]), expand


def find_sites(model: DecoderModel) -> tuple[Projection, ...]:
    return tuple(projection for layer in model.layers for projection in layer.projections)


def module_shapes(model: DecoderModel) -> tuple[dict[str, tuple[int, int]], tuple[str, ...]]:
    """Returns inputs and outputs of the whole network's modules that adapters may change.

    The second result are prefixes of layers of a kind that this stage has not: the stage that has them checks their
    modules.
    """
    of_kind: dict[tuple[object, ...], dict[str, tuple[int, int]]] = {}
    for layer in model.layers:
        prefix = model.names.layer(model.share.layers.start + layer.index)
        of_kind[_kind_of(layer.config)] = {
            module.name.removeprefix(prefix): (module.in_features, module.out_features)
            for projection in layer.projections
            for module in projection.modules
        }
    shapes, others = dict[str, tuple[int, int]](), list[str]()
    for number, config in enumerate(model.config.layers):
        prefix, within = model.names.layer(number), of_kind.get(_kind_of(config))
        if within is None:
            others.append(prefix)
        else:
            shapes |= {prefix + name: shape for name, shape in within.items()}
    return shapes, tuple(others)


def _kind_of(layer: Layer) -> tuple[object, ...]:
    """Returns what layers with the same modules have in common."""
    return type(layer.mixer), type(layer.feed), None if layer.mlp is None else layer.mlp.inner_features


def read_soft_prompt(folder: PeftFolder, width: int, dtype: torch.dtype, max_tokens: int) -> Tensor:
    """Reads the rows [at most max_tokens, width] of PEFT's prompt tuning, rounded to `dtype`, as PEFT rounds them.

    Raises BlockyardError MODEL_NOT_LOADED for what is no such prompt, or is one of another model.
    """
    header, path = folder.header(), folder.weights_path
    entry = header.get(TENSOR)
    if entry is None or len(header) > 1 or entry.stored_dtype not in STORED_DTYPES:
        raise unusable(f"{path} must have {TENSOR} in floating point and nothing else, and has {', '.join(header)}")
    if (folder.fields.get("num_transformer_submodules") or 1) != 1:
        raise unusable(f"{folder.config_path}: num_transformer_submodules above 1 is for models of two halves")
    num_tokens, told = folder.fields.get("num_virtual_tokens"), folder.fields.get("token_dim")
    if len(entry.shape) != 2 or entry.shape[0] != num_tokens or told not in (None, entry.shape[1]):
        sizes = f"num_virtual_tokens {num_tokens} and token_dim {told}"
        raise unusable(f"{path}: {TENSOR} is {list(entry.shape)}, and {folder.config_path.name} has {sizes}")
    if entry.shape[1] != width:
        raise unusable(f"{path} has rows of {entry.shape[1]} numbers, and the model {width}: take one for this model")
    if not 1 <= entry.shape[0] <= max_tokens:
        limit = f"more than --max-prompt-adapter-tokens {max_tokens}" if entry.shape[0] else "which is none"
        raise unusable(f"{path} has {entry.shape[0]} virtual tokens, {limit}")
    return map_tensor(entry, reads_ahead=True).to(dtype, copy=True)
