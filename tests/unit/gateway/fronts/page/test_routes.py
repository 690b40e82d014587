from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx
import pytest

from blockyard.admin.v1 import admin_pb2
from blockyard.security.authentication import Authenticator
from gateway.fronts.openai.app import make_app
from gateway.fronts.page.routes import POLICY, STATUS_PATH, StatusBoard, add_page, load_assets
from tests.unit.gateway.fronts.openai.scripted import ScriptedService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastapi import FastAPI

TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


async def ask(model: str) -> admin_pb2.GetStatusResponse:
    return admin_pb2.GetStatusResponse(gateway=admin_pb2.GatewayStatus(gateway_id=f"g-1 {model}"))


@pytest.fixture
def app() -> FastAPI:
    app = make_app(ScriptedService())  # type: ignore[arg-type]
    add_page(app, StatusBoard(ask))
    return app


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


async def test_the_page_is_at_the_root(http: httpx.AsyncClient) -> None:
    response = await http.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == TYPES["html"]
    assert response.text.startswith("<!doctype html>")
    assert response.content == (await http.get("/page/index.html")).content


@pytest.mark.parametrize("name", sorted(load_assets()))
async def test_every_file_is_served_as_what_it_is(http: httpx.AsyncClient, name: str) -> None:
    response = await http.get(f"/page/{name}")
    assert response.headers["content-type"] == TYPES[name.rsplit(".")[-1]]
    assert response.content == load_assets()[name].content


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/page/style.css", "/page/icon.svg"])
async def test_headers_let_nothing_in(http: httpx.AsyncClient, path: str) -> None:
    headers = (await http.get(path)).headers
    assert headers["content-security-policy"] == POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-opener-policy"] == headers["cross-origin-resource-policy"] == "same-origin"


def test_the_policy_names_no_source_but_the_gateway_itself() -> None:
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules.pop("require-trusted-types-for") == "'script'"
    assert rules["default-src"] == "'none'"
    assert {name for name, sources in rules.items() if sources != "'none'"} == {
        "script-src",
        "style-src",
        "img-src",
        "connect-src",
    }
    assert set(rules.values()) == {"'none'", "'self'"}


async def test_a_file_that_is_known_is_not_sent_again(http: httpx.AsyncClient) -> None:
    first = await http.get("/page/main.js")
    assert first.headers["cache-control"] == "no-cache"
    for told in (first.headers["etag"], f'"other", W/{first.headers["etag"]}'):
        again = await http.get("/page/main.js", headers={"if-none-match": told})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
        assert again.headers["content-security-policy"] == POLICY
    changed = await http.get("/page/main.js", headers={"if-none-match": '"other"'})
    assert changed.status_code == 200


@pytest.mark.parametrize("name", ["other.js", "__init__.py", "..%2Froutes.py", "..%2F..%2Fserver.py", "%00", "static"])
async def test_nothing_else_is_served(http: httpx.AsyncClient, name: str) -> None:
    response = await http.get(f"/page/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["message"]


async def test_files_have_a_head_and_take_nothing(http: httpx.AsyncClient) -> None:
    for path in ("/", "/page/main.js"):
        assert (await http.head(path)).status_code == 200
        assert (await http.post(path)).status_code == 405


async def test_status_is_json_that_is_not_kept(http: httpx.AsyncClient) -> None:
    response = await http.get(STATUS_PATH)
    assert response.headers["content-type"] == "application/json"
    assert response.headers["cache-control"] == "no-store"
    assert json.loads(response.content)["gateway"]["gateway_id"] == "g-1 "
    assert (await http.get(f"{STATUS_PATH}?model=large")).json()["gateway"]["gateway_id"] == "g-1 large"


def test_the_files_alone_are_open_to_all() -> None:
    assert Authenticator.is_open("/")
    assert all(Authenticator.is_open(f"/page/{name}") for name in load_assets())
    assert not Authenticator.is_open(STATUS_PATH)


def test_the_document_is_of_the_api_alone(app: FastAPI) -> None:
    assert not {"/", "/page/{name}", STATUS_PATH} & set(app.openapi()["paths"])
