from __future__ import annotations

from typing import TYPE_CHECKING

import anthropic
import httpx2
import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx


@pytest.fixture
async def client(http: httpx.AsyncClient) -> AsyncIterator[anthropic.AsyncAnthropic]:
    # With a connection of ours: to read the certificates of the world takes longer than a test.
    async with httpx2.AsyncClient(timeout=20, verify=False) as connection:
        yield anthropic.AsyncAnthropic(
            base_url=str(http.base_url), api_key="none", max_retries=0, http_client=connection
        )
