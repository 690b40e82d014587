"""Builds a model's weights once more, from another source, where the old ones lie. Runs in the device thread.

The order of what is built follows from the configuration alone, so that in an arena that was rewound every weight has
the address that it had: what was recorded stays valid, and of memory no second copy is needed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from blockyard.model_config.fields import unusable
from worker_service.models.builder import build_decoder
from worker_service.models.determinism import determinism_id
from worker_service.models.weight_files import Weights

if TYPE_CHECKING:
    from blockyard.contract.workers import CacheInfo
    from worker_service.models.loader import RunnableModel
    from worker_service.steps.step_executor import StepExecutor


class Source(Weights, Protocol):
    def finish(self) -> str:
        """Returns the digest of all that was read, in hex."""
        ...


def refill(
    executor: StepExecutor, loaded: RunnableModel, cache: CacheInfo, source: Source, version: str
) -> tuple[RunnableModel, CacheInfo]:
    """Reads all weights from a source, and finds what is promised of their results.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, where the source cannot be read, or is of other tensors. Then the weights are
            neither the old ones nor the new ones.
    """
    model, backend, arena = loaded.model, loaded.backend, loaded.arena
    if not backend.packs_into_arenas:
        # Both at once may be more than there is room for.
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
        # Choices that were made for the old weights are gone with them.
        batch_invariant = executor.runner.prove_batch_invariance()
    loaded = replace(loaded, weights_digest=source.finish(), version=version)
    is_alone = loaded.parallel.world_size == 1
    # Ranks compute nothing together here: what they computed of their first weights stands for this machine.
    if is_alone:
        executor.fingerprint = executor.runner.fingerprint()
    identity = determinism_id(loaded, executor.fingerprint)
    return loaded, replace(cache, determinism_id=identity, batch_invariant=batch_invariant)
