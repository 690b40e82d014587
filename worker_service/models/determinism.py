"""The determinism id, of all that a worker's results depend on: two workers with one id compute the same bits.

It does not cover threads: they change nothing where results are batch-invariant.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from blockyard.grammars import limits as grammar_limits
from worker_service.device.device import instruction_set
from worker_service.models.source import source_digest

if TYPE_CHECKING:
    from worker_service.models.loader import RunnableModel


def determinism_id(loaded: RunnableModel, fingerprint: str) -> str:
    """Hashes weights, configuration, kernels, sampler, instruction set, library, and what they made of fixed tokens.

    Args:
        loaded: the model, and what computes it.
        fingerprint: a hash of logits, which differ where anything that matters is not in the list.
    """
    parts = (
        loaded.weights_digest,
        # All of it: a window or a scaling of positions shows in long texts only, not in what was computed here.
        repr(loaded.config),
        loaded.backend.name,
        source_digest(),
        instruction_set(loaded.backend.device),
        torch.__version__,
        loaded.backend.identity,
        loaded.foreign_code,
        grammar_limits.identity(),
        fingerprint,
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
