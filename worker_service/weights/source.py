"""Finds and checks the folder from which weights are reloaded, and rebuilds a model's weights from it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from blockyard.errors import BlockyardError, Reason
from blockyard.model_config.fields import unusable
from blockyard.model_files import resolve_model
from blockyard.paths import open_file, resolve_path
from worker_service.models.builder import build_decoder
from worker_service.models.determinism import determinism_id
from worker_service.models.loader import RunnableModel, open_weights
from worker_service.models.model_config import read_config
from worker_service.models.weight_files import WeightFiles, Weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from blockyard.contract.workers import CacheInfo
    from worker_service.models.random_weights import RandomWeights
    from worker_service.set_up import ModelSource
    from worker_service.steps.step_executor import StepExecutor


class Source(Weights, Protocol):
    def finish(self) -> str:
        """Returns the digest of the weights that were read, in hex."""
        ...


def refill(
    executor: StepExecutor, loaded: RunnableModel, cache: CacheInfo, source: Source, version: str
) -> tuple[RunnableModel, CacheInfo]:
    """Rebuilds all weights from a source in the memory of the old ones, in the device thread.

    The order of the weights follows from the configuration only, so that in a rewound arena every weight gets its old
    address again: captured steps stay valid, and no memory for a second copy is needed. Also updates the batch
    invariance and the determinism id.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, if the source cannot be read or has other tensors. Then the weights are a
            mixture of old and new weights.
    """
    model, backend, arena = loaded.model, loaded.backend, loaded.arena
    if not backend.packs_into_arenas:
        # The old weights are dropped first: memory may not hold both.
        model.replace_weights(None)
    arena.rewind()
    built = build_decoder(loaded.config, backend, source, loaded.parallel, arena)
    if list(map(len, arena.parts)) != list(map(len, loaded.parts)):
        raise unusable(
            "the embedding and the output projection must be tied in the new weights as in the loaded ones: "
            "both, or neither"
        )
    if model.pooling is not None:
        model.pooling.forget()
    batch_invariant = cache.batch_invariant
    if not backend.packs_into_arenas:
        model.replace_weights(built)
        # The probe's choices for the old weights are lost with them.
        batch_invariant = executor.runner.prove_batch_invariance()
    loaded = replace(loaded, weights_digest=source.finish(), version=version)
    is_alone = loaded.parallel.world_size == 1
    # Ranks compute nothing together here: the fingerprint of the first weights continues to identify this machine.
    if is_alone:
        executor.fingerprint = executor.runner.fingerprint()
    identity = determinism_id(loaded, executor.fingerprint)
    return loaded, replace(cache, determinism_id=identity, batch_invariant=batch_invariant)


def find_folder(
    told: ModelSource, model: str, revision: str, kept: Path, root: Path | None
) -> tuple[Path, Path | None]:
    """Returns a folder of weights, and the root below which its files must lie (None: they may lie anywhere).

    Args:
        told: the source from which the model was loaded.
        model: empty, the name in `told`, or a folder.
        revision: the revision of a hub id; empty: the revision in `told`.
        kept: the folder of the loaded model.
        root: the folder below which other folders are allowed.

    Raises:
        BlockyardError: PERMISSION_DENIED for any other folder, links resolved; MODEL_NOT_LOADED if the folder does not
            exist; FIELD_INVALID for an invalid path or revision.
    """
    if not model or model == told.model:
        if not revision or revision == told.revision:
            return kept, None
        return resolve_model(told.model, revision, "weights"), None
    folder, own = resolve_path("model", model), kept.resolve()
    is_below_root = root is not None and folder.is_relative_to(root.resolve())
    if folder != own and not is_below_root:
        where = f"below {root}" if root else "of the loaded model (see --worker-model-root)"
        raise BlockyardError(Reason.PERMISSION_DENIED, f"{model} may not be read: weights must be in a folder {where}")
    if not os.path.isdir(folder):
        raise unusable(f"{model} is no folder on this machine")
    return resolve_model(str(folder), "", "weights"), None if folder == own else root


def open_source(
    loaded: RunnableModel,
    told: ModelSource,
    wanted: tuple[str, str],
    root: Path | None,
    on_progress: Callable[[int, int], None],
) -> WeightFiles | RandomWeights:
    """Opens the weights of a folder for a loaded model. `wanted`: model and revision, as in `find_folder`.

    Raises:
        BlockyardError: as in `find_folder`; MODEL_NOT_LOADED if the folder's configuration or tensors do not match the
            model.
    """
    folder, root = find_folder(told, *wanted, loaded.folder, root)
    _require_readable(folder / "config.json", root)
    config = read_config(folder, loaded.config.dtype, loaded.config.task)
    if config != replace(loaded.config, quantized_kv=None):
        raise unusable(f"{folder / 'config.json'} describes another model than the loaded one")
    files = open_weights(
        loaded.config, folder, loaded.backend.device, loaded.origin.load_format, on_progress, loaded.parallel, root
    )
    files.check(loaded.tensors)
    return files


def _require_readable(path: Path, root: Path | None) -> None:
    try:
        open_file(path, root).close()
    except OSError as error:
        raise unusable(f"{path} cannot be read: {error.strerror}") from None
