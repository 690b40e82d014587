"""The determinism id, of all that a worker's results depend on: two workers with one id compute the same bits.

It does not cover threads: they change nothing where results are batch-invariant.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import kernels
from worker_service.device.device import instruction_set

if TYPE_CHECKING:
    from collections.abc import Iterable

    from worker_service.models.loader import LoadedModel

_WORKER = Path(__file__).parents[1]


def determinism_id(loaded: LoadedModel, fingerprint: str) -> str:
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
        fingerprint,
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def source_digest() -> str:
    """Hashes the source code that computes: kernels, networks, sampler."""
    kernel_files = (path for root in kernels.__path__ for path in Path(root).rglob("*.py"))
    own_files = (path for wing in ("models", "sampling") for path in (_WORKER / wing).rglob("*.py"))
    return _digest([*kernel_files, *own_files])


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
