"""Finds the folder that weights are loaded from anew, and refuses one that is not allowed or cannot be taken."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError, Reason
from blockyard.model_config.fields import unusable
from blockyard.model_files import resolve_model
from worker_service.models.loader import open_weights
from worker_service.models.model_config import read_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_service.models.loader import LoadedModel
    from worker_service.models.random_weights import RandomWeights
    from worker_service.models.weight_files import WeightFiles
    from worker_service.set_up import ModelSource


def find_folder(told: ModelSource, model: str, revision: str, kept: Path, root: Path | None) -> Path:
    """Finds a folder of weights.

    Args:
        told: what the model was loaded from.
        model: empty, the name that `told` has, or a folder.
        revision: for a hub id; empty: as told.
        kept: the folder of the loaded model.
        root: the folder below which others are allowed.

    Raises:
        BlockyardError: PERMISSION_DENIED for another folder than these, links resolved; MODEL_NOT_LOADED for none.
    """
    if not model or model == told.model:
        if not revision or revision == told.revision:
            return kept
        return resolve_model(told.model, revision, "weights")
    folder = Path(model).resolve()
    is_below_root = root is not None and folder.is_relative_to(root.resolve())
    if folder != kept.resolve() and not is_below_root:
        where = f"below {root}" if root else "of the loaded model (see --worker-model-root)"
        raise BlockyardError(Reason.PERMISSION_DENIED, f"{model} may not be read: weights must be in a folder {where}")
    if not folder.is_dir():
        raise unusable(f"{model} is no folder on this machine")
    return resolve_model(str(folder), "", "weights")


def open_source(
    loaded: LoadedModel,
    told: ModelSource,
    wanted: tuple[str, str],
    root: Path | None,
    on_progress: Callable[[int, int], None],
) -> WeightFiles | RandomWeights:
    """Opens the weights of a folder for a model that was loaded; `wanted`: model and revision, as of `find_folder`.

    Raises:
        BlockyardError: as `find_folder`; MODEL_NOT_LOADED, where the folder's configuration or tensors are not those of
            the model.
    """
    folder = find_folder(told, *wanted, loaded.folder, root)
    if read_config(folder, loaded.config.dtype, loaded.config.task) != loaded.config:
        raise unusable(f"{folder / 'config.json'} is another model's than the loaded one")
    files = open_weights(
        loaded.config, folder, loaded.backend.device, loaded.origin.load_format, on_progress, loaded.parallel
    )
    files.check(loaded.tensors)
    return files
