"""The models in the hub's cache on this machine, which other programs share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockyard.errors import BlockyardError, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

MAIN = "main"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A hub's model in the cache.

    Attributes:
        name: its hub id.
        folder: of the main branch, or of the revision that came last.
        size_bytes: of all its revisions on the disk.
        used: the time of its last use, in seconds since 1970.
        revisions: commits.
    """

    name: str
    folder: Path
    size_bytes: int
    used: float
    revisions: tuple[str, ...]

    @property
    def has_weights(self) -> bool:
        return any(self.folder.glob("*.safetensors"))


def list_models() -> list[CachedModel]:
    """Lists the cached models by name. Raises BlockyardError if the hub's library is not installed."""
    repositories = (each for each in _scan() if each.repo_type == "model" and each.revisions)
    return sorted(map(_read, repositories), key=lambda model: model.name.lower())


def delete_model(model: CachedModel) -> int:
    """Deletes all revisions of a model, and returns the bytes that this freed."""
    import huggingface_hub  # noqa: PLC0415  an optional feature

    strategy = huggingface_hub.scan_cache_dir().delete_revisions(*model.revisions)
    strategy.execute()
    return int(strategy.expected_freed_size)


def _scan() -> Iterable[Any]:
    try:
        import huggingface_hub  # noqa: PLC0415  an optional feature
    except ImportError:
        raise BlockyardError(
            Reason.FEATURE_DISABLED, "the hub's cache needs the package huggingface_hub: pip install 'blockyard[serve]'"
        ) from None
    try:
        return huggingface_hub.scan_cache_dir().repos
    except huggingface_hub.CacheNotFound:
        return ()


def _read(repository: Any) -> CachedModel:
    last = max(repository.revisions, key=lambda revision: (MAIN in revision.refs, revision.last_modified))
    return CachedModel(
        name=repository.repo_id,
        folder=Path(last.snapshot_path),
        size_bytes=repository.size_on_disk,
        used=repository.last_accessed,
        revisions=tuple(revision.commit_hash for revision in repository.revisions),
    )
