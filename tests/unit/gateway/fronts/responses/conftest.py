from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from tests.unit.gateway.fronts.openai.scripted import ScriptedService
from tests.unit.gateway.fronts.openai.serving import serve_openai

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
async def http(service: ScriptedService) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serve_openai(service) as url,
        httpx.AsyncClient(base_url=url, timeout=20, verify=False) as client,
    ):
        yield client


@pytest.fixture
def client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    # With a connection of ours: to read the certificates of the world takes longer than a test.
    connection: Any = http
    return openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0, http_client=connection)
