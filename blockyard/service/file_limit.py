"""Raises the number of files and connections that this process may have open at once."""

from __future__ import annotations

import resource
from contextlib import suppress


def raise_file_limit() -> int:
    """Raises this process's limit to what it may be raised to, and returns it.

    What a shell or a supervisor gives, often 1024, is for programs that cannot have more; a server's connections can.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems say that there is no limit, and have one.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
