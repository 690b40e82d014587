"""A hash of the source code that computes, which tells versions of Blockyard apart."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import blockyard_kernels

if TYPE_CHECKING:
    from collections.abc import Iterable

_WORKER = Path(__file__).parents[1]
# Packages whose code decides a model's answers.
_WINGS = ("models", "sampling", "grammars", "pooling", "lora")


def source_digest() -> str:
    """Hashes the source code that computes: kernels, networks, sampler, masks of grammars, heads, adapters."""
    kernel_files = (path for root in blockyard_kernels.__path__ for path in Path(root).rglob("*.py"))
    own_files = (path for wing in _WINGS for path in (_WORKER / wing).rglob("*.py"))
    return _digest([*kernel_files, *own_files])


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
