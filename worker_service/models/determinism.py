"""The determinism id, a hash of everything that results depend on: workers with equal ids compute the same bits.

It does not cover the number of threads, which does not change batch-invariant results.
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
    """Hashes weights, configuration, kernels, sampler, instruction set, library, and the logits of fixed tokens.

    Args:
        loaded: the model and its backend.
        fingerprint: a hash of logits, which covers differences that the other values miss.
    """
    parts = (
        loaded.weights_digest,
        # The whole configuration: a window or a scaling of positions only changes long texts, not the fixed tokens.
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
