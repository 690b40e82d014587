from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.unit.gateway.core import Core
from tests.unit.gateway.harness import Front, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    async with FakeScheduler() as scheduler:
        yield scheduler


@pytest.fixture
async def front(scheduler: FakeScheduler) -> AsyncIterator[Front]:
    async with serving(scheduler) as front:
        yield front
