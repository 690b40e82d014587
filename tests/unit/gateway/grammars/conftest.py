"""The processes that compile grammars, for all tests of a module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gateway.grammars.compiling.compilers import Compilers

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def compilers() -> Iterator[Compilers]:
    """Compilers that no test broke."""
    made = Compilers()
    yield made
    made.close()
