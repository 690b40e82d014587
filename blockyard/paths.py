"""Checks paths and names that come from outside, and opens files safely.

A path's length is checked before the file system is accessed. Only regular files are opened, without blocking; if a
file must lie below a root, the opened file is checked, after all links. Standard library only.
"""

from __future__ import annotations

import os
import stat
from errno import EACCES, EFBIG, EINVAL
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError, Reason, Violation, invalid

if TYPE_CHECKING:
    from io import BufferedReader

# Far below the system's limit for a path (4,096), so that a root fits before it.
MAX_PATH_BYTES = 1024
# The longest name that file systems take.
MAX_PART_BYTES = 255
MAX_NAME_CHARACTERS = 256
# Configurations and tokenizers are read as a whole: the largest have about 40 MB.
MAX_WHOLE_FILE_BYTES = 1 << 28
# Open a pipe without waiting for a writer (it is refused then), and never take a controlling terminal.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def wrong_path(path: str) -> str:
    """Returns why a text is not a valid path; empty: it is valid. Does not access the file system."""
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "must be Unicode text"
    if not encoded:
        return "must not be empty"
    if len(encoded) > MAX_PATH_BYTES:
        return f"must be at most {MAX_PATH_BYTES} bytes long, not {len(encoded)}"
    if b"\0" in encoded:
        return "must not contain a NUL character"
    if max(map(len, encoded.split(b"/"))) > MAX_PART_BYTES:
        return f"must have parts of at most {MAX_PART_BYTES} bytes"
    return ""


def wrong_name(name: str) -> str:
    """Returns why a text is not a valid name, such as of a weights version; empty: it is valid."""
    return "" if 0 < len(name) <= MAX_NAME_CHARACTERS else f"must have 1 to {MAX_NAME_CHARACTERS} characters"


def check_path(field: str, path: str) -> None:
    """Raises BlockyardError FIELD_INVALID for a text that is not a valid path."""
    if wrong := wrong_path(path):
        raise invalid([Violation(field, wrong)])


def resolve_path(field: str, path: str, base: Path = Path()) -> Path:
    """Resolves the links of a path relative to `base`; the path need not exist.

    Raises BlockyardError FIELD_INVALID for a malformed path and for circular links.
    """
    check_path(field, path)
    try:
        resolved = (base / path).resolve()
    except (OSError, RuntimeError):
        resolved = None
    # From Python 3.13 on, `resolve` leaves circular links in the path; before, it raises.
    if resolved is None or any(map(os.path.islink, (resolved, *resolved.parents))):
        raise invalid([Violation(field, f"{path} leads through links that do not end")])
    return resolved


def find_below(root: Path, path: str, field: str, setting: str) -> Path:
    """Finds a folder below a root.

    Args:
        root: the folder below which the result must lie, after resolving links.
        path: relative to the root, or absolute.
        field: the name of the path in a request.
        setting: the name of the option that sets the root, for messages.

    Raises:
        BlockyardError: FIELD_INVALID as for `resolve_path`; PERMISSION_DENIED if the path is not below the root;
            MODEL_NOT_LOADED if it is not a folder.
    """
    base = root.resolve()
    folder = resolve_path(field, path, base)
    if not folder.is_relative_to(base):
        raise BlockyardError(Reason.PERMISSION_DENIED, f"{path} is not below {setting}")
    # Unlike Path.is_dir it returns False instead of raising if the path is too long.
    if not os.path.isdir(folder):
        raise BlockyardError(Reason.MODEL_NOT_LOADED, f"{path} is no folder below {setting}")
    return folder


def open_file(path: Path, root: Path | None = None) -> BufferedReader:
    """Opens a regular file to read it.

    Args:
        path: the file's path; links are followed.
        root: the folder below which the opened file must lie; None: anywhere.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or does not lie below the root.
    """
    if "\0" in str(path):
        raise OSError(EINVAL, "its name has a NUL in it", str(path))
    # Check before opening, since opening some devices has effects; check again after, since the path may have changed.
    _require_regular(os.stat(path), path)
    descriptor = os.open(path, _FLAGS)
    try:
        _require_regular(os.fstat(descriptor), path)
        if root is not None and not _find_place(descriptor, path).is_relative_to(root.resolve()):
            raise PermissionError(EACCES, f"a link leads out of {root}", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _require_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(EINVAL, "it is no regular file", str(path))


def _find_place(descriptor: int, path: Path) -> Path:
    """Returns the location of an open file: from the system if possible, else from its path."""
    try:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        return path.resolve()


def read_file(path: Path, root: Path | None = None) -> bytes:
    """Reads a whole file of at most 256 MiB; raises OSError as `open_file` does, and for larger files."""
    with open_file(path, root) as file:
        content = file.read(MAX_WHOLE_FILE_BYTES + 1)
    if len(content) > MAX_WHOLE_FILE_BYTES:
        raise OSError(EFBIG, f"it has more than {MAX_WHOLE_FILE_BYTES} bytes", str(path))
    return content
