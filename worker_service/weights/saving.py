"""Saves the weights of a worker in a new folder, which a worker can load with --load-format.

The saved weights give the same bits: their digest is the digest of the original files. Steps never change weights, so
they continue during a save. Knows no messages.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from blockyard.contract.workers import SavedState, SaveRequest, WorkerState
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.model_files import find_companions
from blockyard.paths import check_path, resolve_path
from blockyard.telemetry import EventLogger
from worker_service.models.loader import RunnableModel, facts_of, open_weights
from worker_service.models.packed_files import make_key, pack_name, write_pack
from worker_service.models.sharded_files import Manifest, hash_file, manifest_name, write_manifest, write_slices

if TYPE_CHECKING:
    from worker_service.weights.residency import Owner


log = EventLogger(__name__)

_FULL = (ENOSPC, EDQUOT, EFBIG)


def find_target(root: Path | None, folder: str) -> Path:
    """Returns the path of a new folder, if it is allowed.

    Args:
        root: the folder below which it must be, links resolved; None: saving is not allowed.
        folder: relative to the root, or a path below it.

    Raises:
        BlockyardError: FEATURE_DISABLED without a root, FIELD_INVALID if `folder` is no valid name of a new folder,
            PERMISSION_DENIED for a path outside the root.
    """
    if root is None:
        raise BlockyardError(Reason.FEATURE_DISABLED, "saving needs a worker that was started with --worker-save-root")
    check_path("folder", folder)
    base = root.resolve()
    target = base / folder
    if ".." in target.parts or target == base:
        raise invalid([Violation("folder", f"{folder!r} does not name a new folder")])
    if not target.is_relative_to(base) or resolve_path("folder", str(Path(folder).parent), base) != target.parent:
        raise BlockyardError(Reason.PERMISSION_DENIED, f"{folder} is not below {root}, or leads there through a link")
    return target


@contextmanager
def new_folder(target: Path, rank: int, world_size: int) -> Generator[Path]:
    """Yields an empty folder beside `target`, which is renamed to it at the end; after an error it is deleted.

    If the ranks of a group share a disk, each moves its own files into the target, and the file that completes them
    last.

    Raises:
        BlockyardError: FIELD_INVALID if the target exists, unless other ranks of the group made it; NEVER_FITS if the
            disk is full; WRONG_STATE if it cannot be written for another reason.
    """
    _refuse_present(target, rank, world_size)
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        _publish(unfinished, target, world_size)
    except OSError as error:
        raise _explain(target, error.errno, error.strerror or str(error)) from None
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise _explain(target, int(number[1]) if number else None, str(error)) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _refuse_present(target: Path, rank: int, world_size: int) -> None:
    if not os.path.lexists(target):
        return
    is_ours = target.is_dir() and not target.is_symlink() and world_size > 1
    if not is_ours or any(f"-rank-{rank}" in path.name for path in target.iterdir()):
        raise invalid([Violation("folder", f"{target} already exists: name a new folder")])


def _publish(unfinished: Path, target: Path, world_size: int) -> None:
    if world_size == 1:
        unfinished.rename(target)
        return
    target.mkdir(exist_ok=True)
    # A rank's files are complete once the JSON file about them is there.
    for path in sorted(unfinished.iterdir(), key=lambda path: ("-rank-" in path.name, path.suffix == ".json")):
        try:
            (target / path.name).hardlink_to(path)
        except FileExistsError:
            # The configuration and the tokenizer, which other ranks bring too.
            if (target / path.name).read_bytes() != path.read_bytes():
                raise


def _explain(target: Path, number: int | None, problem: str) -> BlockyardError:
    if number in _FULL:
        return BlockyardError(Reason.NEVER_FITS, f"{target} cannot be written, the disk is full: {problem}")
    return BlockyardError(Reason.WRONG_STATE, f"{target} cannot be written: {problem}")


OnSave = Callable[[str, float | None], None]

# The name that vLLM uses.
DEFAULT_FILE_BYTES = 5 * 10**9


class Saving:
    def __init__(self, owner: Owner, root: Path | None = None, on_save: OnSave = lambda *_: None) -> None:
        """`root`: the folder below which weights may be saved; None: saving is not allowed.

        `on_save` gets the format of each save and its seconds, or None if the save failed or was refused.
        """
        self._owner = owner
        self._root = root
        self._on_save = on_save

    async def save(self, request: SaveRequest, on_progress: Callable[[int, int], None]) -> SavedState:
        """Saves the weights; calls `on_progress` in another thread. Continues to the end even if its caller leaves.

        Args:
            request: the format, the folder as `find_target` takes it, and the bytes of one sharded file; 0: 5 GB.
            on_progress: called with (bytes done, bytes in all).

        Raises:
            BlockyardError: WRONG_STATE in another state, or if the weights do not come from a folder; FEATURE_DISABLED
                if these kernels cannot save this format; errors of `find_target` and `new_folder`.
        """
        begin = time.perf_counter()
        try:
            with self._owner.lifecycle("SaveState", WorkerState.LOADED, WorkerState.CACHE_READY):
                max_file_bytes = request.max_file_bytes or DEFAULT_FILE_BYTES
                saved = await self._save(request.format, request.folder, max_file_bytes, on_progress)
        except BaseException:
            self._on_save(request.format, None)
            raise
        seconds = time.perf_counter() - begin
        self._on_save(request.format, seconds)
        log.info("the weights are saved", folder=saved.folder, bytes=saved.num_bytes, seconds=round(seconds, 3))
        return saved

    async def _save(
        self, save_format: str, folder: str, max_file_bytes: int, on_progress: Callable[[int, int], None]
    ) -> SavedState:
        target = await asyncio.to_thread(find_target, self._root, folder)
        loaded = self._owner.set_up.loaded
        assert loaded is not None
        loaded.require_own_code("SaveState")
        if loaded.config.pooling is not None:
            raise BlockyardError(Reason.FEATURE_DISABLED, "the weights of a model that pools cannot be saved")
        log.info("saving the weights", format=save_format, folder=str(target))
        save = _save_packed if save_format == "packed" else _save_sharded
        parallel = loaded.parallel

        def work() -> SavedState:
            with new_folder(target, parallel.rank, parallel.world_size) as unfinished:
                save(loaded, unfinished, max_file_bytes, on_progress)
                paths = sorted(unfinished.iterdir())
                names, num_bytes = tuple(path.name for path in paths), sum(path.stat().st_size for path in paths)
            return SavedState(str(target), names, num_bytes)

        return await asyncio.to_thread(work)


def _copy_companions(loaded: RunnableModel, folder: Path) -> dict[str, str]:
    """Copies the configuration and the tokenizer; returns their SHA-256 by name."""
    for path in find_companions(loaded.folder):
        shutil.copyfile(path, folder / path.name)
    return {path.name: hash_file(path) for path in sorted(folder.iterdir())}


def _save_packed(
    loaded: RunnableModel, folder: Path, max_file_bytes: int, on_progress: Callable[[int, int], None]
) -> None:
    if not loaded.backend.packs_into_arenas or loaded.backend.device.type != "cpu":
        message = f"the weights of the {loaded.backend.name} kernels cannot be saved packed: save them sharded"
        raise BlockyardError(Reason.FEATURE_DISABLED, message)
    companions = _copy_companions(loaded, folder)
    key = make_key(loaded.config, loaded.backend, loaded.quantization, loaded.parallel, folder, loaded.model_digest)
    write_pack(folder / pack_name(loaded.parallel.rank), key, facts_of(loaded, companions), loaded.parts, on_progress)


def _save_sharded(
    loaded: RunnableModel, folder: Path, max_file_bytes: int, on_progress: Callable[[int, int], None]
) -> None:
    if loaded.origin.load_format == "packed":
        message = "the weights were loaded packed, and cannot be saved sharded: load the original model first"
        raise BlockyardError(Reason.WRONG_STATE, message)
    config, parallel = loaded.config, loaded.parallel
    if config.stored is not None:
        message = "the weights of a quantized checkpoint cannot be sharded: save them packed"
        raise BlockyardError(Reason.FEATURE_DISABLED, message)
    device = loaded.backend.device
    files = open_weights(config, loaded.folder, device, loaded.origin.load_format, on_progress, parallel)
    paths = write_slices(config, files, parallel, folder, max_file_bytes)
    if files.finish() != loaded.weights_digest:
        message = f"the weights in {loaded.folder} differ from the worker's: reload the model before saving it"
        raise BlockyardError(Reason.WRONG_STATE, message)
    hashes = {path.name: hash_file(path) for path in paths} | _copy_companions(loaded, folder)
    layout = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.rank
    manifest = Manifest(*layout, loaded.weights_digest, loaded.tensors, hashes)
    write_manifest(folder / manifest_name(parallel.rank), manifest)
