"""An HTTP service whose generation is scripted, and connections to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from tests.unit.gateway.fronts.openai.scripted import ScriptedService
from tests.unit.gateway.fronts.openai.serving import serve_openai

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
async def url(service: ScriptedService) -> AsyncIterator[str]:
    async with serve_openai(service) as address:
        yield address


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=20, verify=False) as client:
        yield client
