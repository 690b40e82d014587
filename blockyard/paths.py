"""Paths and names that come from outside, and the files behind them.

A text is bounded before anything looks at the file system for it. A file is opened without waiting, and only if it is a
regular one; where it has to lie below a root, the file that was opened has to, whatever links led to it. Standard
library only.
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

# Far below what a system takes for a path (4,096), so that a root fits before it.
MAX_PATH_BYTES = 1024
# The longest name that file systems take.
MAX_PART_BYTES = 255
MAX_NAME_CHARACTERS = 256
# A configuration or a tokenizer is read as a whole: the largest have some 40 MB.
MAX_WHOLE_FILE_BYTES = 1 << 28
# A pipe without a writer is opened at once, and then refused; a terminal does not become this process's.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def wrong_path(path: str) -> str:
    """Says what keeps a text from being a path; empty: nothing does. Looks at no file."""
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
    """Says what keeps a text from being the name of a thing, such as a version of weights; empty: nothing does."""
    return "" if 0 < len(name) <= MAX_NAME_CHARACTERS else f"must have 1 to {MAX_NAME_CHARACTERS} characters"


def check_path(field: str, path: str) -> None:
    """Raises BlockyardError FIELD_INVALID for a text that is no path."""
    if wrong := wrong_path(path):
        raise invalid([Violation(field, wrong)])


def resolve_path(field: str, path: str, base: Path = Path()) -> Path:
    """Follows the links of a path that is relative to `base`; it need not lead to anything.

    Raises BlockyardError FIELD_INVALID for a text that is no path, and for links that lead in a circle.
    """
    check_path(field, path)
    try:
        return (base / path).resolve()
    except (OSError, RuntimeError):
        raise invalid([Violation(field, f"{path} leads through links that do not end")]) from None


def find_below(root: Path, path: str, field: str, setting: str) -> Path:
    """Finds a folder below a root.

    Args:
        root: below which it lies, links followed.
        path: relative to the root, or absolute.
        field: the name of the path in a request.
        setting: the option that says the root.

    Raises:
        BlockyardError: FIELD_INVALID as `resolve_path`; PERMISSION_DENIED for a place that is not below the root;
            MODEL_NOT_LOADED where there is no folder.
    """
    base = root.resolve()
    folder = resolve_path(field, path, base)
    if not folder.is_relative_to(base):
        raise BlockyardError(Reason.PERMISSION_DENIED, f"{path} is not below {setting}")
    # Unlike Path.is_dir it answers for a path that is too long as well.
    if not os.path.isdir(folder):
        raise BlockyardError(Reason.MODEL_NOT_LOADED, f"{path} is no folder below {setting}")
    return folder


def open_file(path: Path, root: Path | None = None) -> BufferedReader:
    """Opens a regular file to read it.

    Args:
        path: of the file; links are followed.
        root: below which the file that was opened has to lie; None: it may lie anywhere.

    Raises:
        OSError: it cannot be opened, is a folder, a pipe, a socket or a device, or does not lie below the root.
    """
    if "\0" in str(path):
        raise OSError(EINVAL, "its name has a NUL in it", str(path))
    # Before it is opened, since that has an effect on some devices; and afterwards, since another one may be there.
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
    """Finds where an open file lies: of the file itself, where the system says that, else of its path."""
    try:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        return path.resolve()


def read_file(path: Path, root: Path | None = None) -> bytes:
    """Reads a whole file of at most 256 MiB; raises OSError as `open_file` does."""
    with open_file(path, root) as file:
        content = file.read(MAX_WHOLE_FILE_BYTES + 1)
    if len(content) > MAX_WHOLE_FILE_BYTES:
        raise OSError(EFBIG, f"it has more than {MAX_WHOLE_FILE_BYTES} bytes", str(path))
    return content
