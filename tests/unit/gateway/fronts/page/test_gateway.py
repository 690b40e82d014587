"""The page at a real gateway, on sockets, with and without keys."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx

from blockyard.configuration import ModelSettings, PublicSettings, SecuritySettings
from blockyard.security.keys import Key, add_key, digest, make_secret
from gateway.config import GatewayConfiguration, ServiceSettings
from gateway.fronts.page.routes import STATUS_PATH, load_assets
from gateway.server import Server
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.kit.waiting import until
from tests.unit.gateway.harness import DEMO_MODEL, demo_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@asynccontextmanager
async def running(security: SecuritySettings | None = None, **public: bool) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway."""
    async with FakeScheduler(model_digest=demo_tokenizer().model_digest) as scheduler:
        gateway = Server(
            GatewayConfiguration(
                model=ModelSettings(model=str(DEMO_MODEL)),
                public=PublicSettings(grpc_port=0, http_port=0, admin_port=0, **public),
                security=security or SecuritySettings(),
                service=ServiceSettings(scheduler_address=scheduler.address),
            )
        )
        await gateway.start()
        try:
            await until(gateway.generation.is_ready)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.http_port}", verify=False) as http:
                yield http
        finally:
            await gateway.stop()


async def test_serves_the_page_and_its_status() -> None:
    async with running() as http:
        assert (await http.get("/")).content == load_assets()["index.html"].content
        status = (await http.get(STATUS_PATH)).json()
        assert (await http.get(f"{STATUS_PATH}?model={status['models'][0]['name']}")).json()["scheduler"]
        assert (await http.get(f"{STATUS_PATH}?model=other")).status_code == 404
    assert status["gateway"]["version"]
    assert [(model["state"], model["starts_on_demand"]) for model in status["models"]] == [("MODEL_STATE_READY", False)]
    assert status["gateway"]["time_to_first_token"]["count"] == "0"


async def test_files_are_for_all_and_the_status_for_those_with_a_key(tmp_path: Path) -> None:
    secret = make_secret()
    add_key(tmp_path / "keys", Key(name="page", sha256=digest(secret), tenant="team"))
    async with running(SecuritySettings(api_keys_file=str(tmp_path / "keys"))) as http:
        for path in ("/", *(f"/page/{name}" for name in load_assets())):
            assert (await http.get(path)).status_code == 200
        assert (await http.get(STATUS_PATH)).status_code == 401
        told = await http.get(STATUS_PATH, headers={"Authorization": f"Bearer {secret}"})
        assert told.json()["gateway"]["version"]


async def test_can_be_turned_off() -> None:
    async with running(enable_page=False) as http:
        for path in ("/page/main.js", STATUS_PATH):
            assert (await http.get(path)).status_code == 404
        # There is an answer to HEAD, for clients that ask whether somebody is there.
        assert (await http.get("/")).status_code == 405
        assert (await http.head("/")).status_code == 200
        assert (await http.get("/version")).status_code == 200
