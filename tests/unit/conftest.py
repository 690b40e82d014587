from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def sockets() -> Iterator[str]:
    """A folder whose path is short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="by") as folder:
        yield folder
