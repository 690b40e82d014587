from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    import httpx


@pytest.fixture
def client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    # With a connection of ours: to read the certificates of the world takes longer than a test.
    connection: Any = http
    return openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0, http_client=connection)
