"""Identifies a file's state, to detect changes."""

from __future__ import annotations

import os
from typing import NamedTuple


class FileState(NamedTuple):
    """The state of a file after resolving links, since Kubernetes updates mounted files by changing links."""

    inode: int
    modified_ns: int
    num_bytes: int


def file_state(path: str | os.PathLike[str]) -> FileState | None:
    """Returns a file's state, in about a microsecond; None if there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return FileState(status.st_ino, status.st_mtime_ns, status.st_size)
