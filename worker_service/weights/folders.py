"""Makes a new folder below the root of saved weights, completely or not at all.

Files are written to a temporary folder beside it, which is then renamed. If the ranks of a group share a disk, each
moves its own files into the target, and the file that completes them last.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.paths import check_path, resolve_path

if TYPE_CHECKING:
    from collections.abc import Generator

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
    """Yields an empty folder, which becomes `target` at the end; after an error it is deleted.

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
