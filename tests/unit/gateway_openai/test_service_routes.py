"""Models, health, version, and the OpenAPI document."""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai
import pytest

from blockyard import __version__

if TYPE_CHECKING:
    import httpx

    from tests.unit.gateway_openai.scripted import ScriptedService


async def test_lists_the_model(client: openai.AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["scripted"]
    assert models[0].max_model_len == 64  # type: ignore[attr-defined]
    assert await client.models.retrieve("scripted") == models[0]


async def test_an_unknown_model_is_not_found(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("other")
    assert caught.value.code == "MODEL_NOT_FOUND"
    assert (await http.get("/v1/models/some/folder")).json()["error"]["code"] == "MODEL_NOT_FOUND"


async def test_health_follows_the_core(http: httpx.AsyncClient, service: ScriptedService) -> None:
    assert (await http.get("/health")).status_code == 200
    service.ready = False
    response = await http.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "no worker is ready"
    assert response.headers["retry-after"] == "1"


async def test_tells_its_version(http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json() == {"version": __version__}


async def test_the_document_describes_the_bodies(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for path, name in (("/v1/completions", "CompletionBody"), ("/v1/chat/completions", "ChatBody")):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{name}"}
        assert schemas[name]["additionalProperties"] is False
    assert schemas["ChatBody"]["properties"]["tools"]["enum"] == [None, []]
    assert "$defs" not in str(document)
