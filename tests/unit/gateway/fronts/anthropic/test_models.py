"""The models, for Anthropic's real client; OpenAI's form is that of all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anthropic
import pytest

if TYPE_CHECKING:
    import httpx

    from tests.unit.gateway.fronts.openai.scripted import ScriptedService


async def test_the_models_are_listed(client: anthropic.AsyncAnthropic) -> None:
    (model,) = [model async for model in client.models.list()]
    assert (model.type, model.id, model.display_name, model.max_input_tokens) == ("model", "scripted", "scripted", 64)
    assert model.created_at.tzinfo is not None
    assert await client.models.retrieve("scripted") == model


async def test_there_may_be_none(client: anthropic.AsyncAnthropic, service: ScriptedService) -> None:
    service.ready = False
    assert [model async for model in client.models.list()] == []


async def test_a_model_that_is_not_served(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="'other/one' is not served here") as failure:
        await client.models.retrieve("other/one")
    assert failure.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


async def test_others_have_them_in_openais_form(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/models")).json()["object"] == "list"
    versioned = await http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
    assert versioned.json()["first_id"] == versioned.json()["last_id"] == "scripted"
    # Only asking for them has two forms.
    assert (await http.post("/v1/models", headers={"anthropic-version": "2023-06-01"})).status_code == 405
