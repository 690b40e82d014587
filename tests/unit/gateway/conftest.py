from __future__ import annotations

import pytest

from tests.unit.gateway.core import Core


@pytest.fixture
def core() -> Core:
    return Core()
