"""Reads adapters for one loaded network: checks them against it, cuts them for this rank and packs them.

Runs in the loader's thread, while steps are computed. Knows the network's sites, and no cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.model_config.fields import unusable
from worker_service.lora.adapter import Adapter
from worker_service.lora.adapter_files import AdapterFiles
from worker_service.lora.sites import find_sites, module_shapes

if TYPE_CHECKING:
    from pathlib import Path

    from blockyard.capacity.adapters import LoraLimits
    from kernels.arena import Arena
    from kernels.lora import LoraOps, PackedLora
    from worker_service.lora.adapter import LoraRequest
    from worker_service.lora.sites import Site
    from worker_service.models.decoder import DecoderModel


class AdapterReader:
    """The way of adapters into one network, which gets its slots here."""

    def __init__(self, model: DecoderModel, ops: LoraOps, limits: LoraLimits, arena: Arena | None = None) -> None:
        """`arena`: where slots lie, as far as they take memory; None: wherever the backend has it."""
        self.arena = arena
        self._ops = ops
        self._limits = limits
        self._model = model
        self._make_room()

    def _make_room(self) -> None:
        self._layers = self._model.layers
        self._sites = find_sites(self._model)
        self.max_adapter_bytes = sum(
            self._ops.make_room(
                site.packed, self._limits.max_loras, self._limits.max_lora_rank * len(site.modules), self.arena
            )
            for site in self._sites
        )
        """Of the device's memory, that the largest adapter takes outside of the slots."""

    def read(self, request: LoraRequest, folder: Path) -> Adapter:
        """Reads and packs an adapter; raises BlockyardError MODEL_NOT_LOADED, which says what is wrong with it."""
        files = AdapterFiles(folder, self._limits.max_lora_rank)
        self._check(files, folder)
        factors = tuple(self._pack(files, site) for site in self._sites)
        rank = max(sizes[0] for sizes in files.modules.values())
        targets = {name.rpartition(".")[2] for name in files.modules}
        return Adapter(request, rank, tuple(sorted(targets)), files.digest(), factors)

    def _pack(self, files: AdapterFiles, site: Site) -> PackedLora | None:
        names = [module.name for module in site.modules if module.name in files.modules]
        joined = site.join({name: files.read(name) for name in names})
        return None if joined is None else self._ops.pack(site.packed, *joined)

    def _check(self, files: AdapterFiles, folder: Path) -> None:
        shapes = module_shapes(self._model.config)
        for name, (_, in_features, out_features) in files.modules.items():
            if name not in shapes:
                raise unusable(f"{folder}: {name} is no module that adapters can change in this model")
            if shapes[name] != (in_features, out_features):
                there, here = f"{out_features} x {in_features}", " x ".join(map(str, reversed(shapes[name])))
                raise unusable(f"{folder}: {name} is {there} and the model's {here}: it belongs to another model")

    def write(self, slot: int, adapter: Adapter | None) -> None:
        """Brings an adapter into a slot, in the device's thread; None: empties it."""
        if self._layers is not self._model.layers:
            # Weights that were loaded anew, of a backend that does not pack them where the old ones were.
            self._make_room()
        for index, site in enumerate(self._sites):
            self._ops.write(site.packed, slot, None if adapter is None else adapter.factors[index])
