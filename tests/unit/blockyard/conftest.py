"""A fake gateway for callers with and without a loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kit.fake_gateway import FakeGateway

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with FakeGateway().in_thread() as running:
        yield running


@pytest.fixture
async def async_gateway() -> AsyncIterator[FakeGateway]:
    async with FakeGateway() as running:
        yield running
