"""Identifies a file's state, for those who read it again when it changes."""

from __future__ import annotations

import os
from typing import NamedTuple


class FileState(NamedTuple):
    """A file as it is, behind links, by whose change Kubernetes replaces what it mounts."""

    inode: int
    modified_ns: int
    num_bytes: int


def file_state(path: str | os.PathLike[str]) -> FileState | None:
    """Looks at a file, which takes a microsecond; None where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return FileState(status.st_ino, status.st_mtime_ns, status.st_size)
