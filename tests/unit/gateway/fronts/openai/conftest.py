from __future__ import annotations

from typing import TYPE_CHECKING

import openai
import pytest

if TYPE_CHECKING:
    import httpx


@pytest.fixture
def client(url: str, http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    # With a connection of ours: to read the certificates of the world takes longer than a test.
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)
