from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.unit.gateway.fronts.open_inference.harness import InferenceFront, serving_inference

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    async with FakeScheduler() as scheduler:
        yield scheduler


@pytest.fixture
async def front(scheduler: FakeScheduler) -> AsyncIterator[InferenceFront]:
    async with serving_inference(scheduler) as front:
        yield front
