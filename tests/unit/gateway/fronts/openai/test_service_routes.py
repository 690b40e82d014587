"""Models, health, version."""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai
import pytest

from blockyard.version import __version__

if TYPE_CHECKING:
    import httpx

    from tests.unit.gateway.fronts.openai.scripted import ScriptedService


async def test_lists_the_model(client: openai.AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["scripted"]
    assert models[0].max_model_len == 64  # type: ignore[attr-defined]
    assert models[0].has_chat_template is True  # type: ignore[attr-defined]
    assert await client.models.retrieve("scripted") == models[0]


async def test_an_unknown_model_is_not_found(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("other")
    assert caught.value.code == "MODEL_NOT_FOUND"
    assert (await http.get("/v1/models/some/folder")).json()["error"]["code"] == "MODEL_NOT_FOUND"


@pytest.mark.parametrize("path", ["/health", "/health/ready"])
async def test_readiness_follows_the_core(http: httpx.AsyncClient, service: ScriptedService, path: str) -> None:
    assert (await http.get(path)).json() == {"status": "ok"}
    service.ready = False
    response = await http.get(path)
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "no worker is ready"
    assert response.headers["retry-after"] == "1"


async def test_tells_its_version(http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json() == {"version": __version__}


@pytest.mark.parametrize("path", ["/health/live", "/health/startup"])
async def test_a_process_without_a_worker_lives(http: httpx.AsyncClient, service: ScriptedService, path: str) -> None:
    service.ready = False
    response = await http.get(path)
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def test_no_models_are_listed_before_they_are_known(http: httpx.AsyncClient, service: ScriptedService) -> None:
    service.ready = False
    assert (await http.get("/v1/models")).json() == {"object": "list", "data": []}
    assert (await http.get("/v1/models/scripted")).status_code == 404
