"""Raises the limit of open files and connections of this process."""

from __future__ import annotations

import resource
from contextlib import suppress


def raise_file_limit() -> int:
    """Raises the open-file soft limit to the hard limit, and returns the limit.

    The usual soft limit, often 1024, exists for programs that use select; a server needs more.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems report no hard limit but enforce one.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
