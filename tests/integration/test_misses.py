"""`blockyard admin misses` tells of a running system which prompts were computed again, and why."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from blockyard import Client
from blockyard.security.keys import Key, KeyRole, add_key, digest
from tests.integration.conftest import DEMO
from tests.kit.processes.system import System
from tests.unit.blockyard.cli.invoking import run

if TYPE_CHECKING:
    from collections.abc import Iterator

FLAGS = ("--dtype", "float32", "--num-device-blocks", "200", "--block-size", "16")
TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on beside the old red barn. " * 2


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("misses")
    for tenant in ("acme", "emca"):
        add_key(folder / "keys.yaml", Key(name=tenant, sha256=digest(tenant), tenant=tenant))
    add_key(folder / "keys.yaml", Key(name="operator", sha256=digest("operator"), tenant="*", role=KeyRole.ADMIN))
    flags = [f"--api-keys-file={folder / 'keys.yaml'}", "--show-prompt-text"]
    with System(DEMO, folder / "logs", FLAGS, gateway_flags=flags) as running:
        yield running


def admin(system: System, *arguments: str) -> int:
    return run("--api-key", "operator", "admin", *arguments, "--admin-address", f"127.0.0.1:{system.port('admin')}")


def misses(system: System, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert admin(system, "misses", "--json", *arguments) == 0
    return json.loads(capsys.readouterr().out)


def send(system: System, name: str, prompt: str, tenant: str = "acme", **fields: Any) -> str:
    with Client(system.grpc_target, api_key=tenant) as client:
        answer = client.generate(prompt, request_id=name, max_tokens=20, temperature=0.0, ignore_eos=True, **fields)
    return answer.choices[0].text


def test_every_reason_is_told(system: System, capsys: pytest.CaptureFixture[str]) -> None:
    answer = send(system, "first", TEXT)
    send(system, "goes-on", TEXT + answer + " What came then?")
    assert misses(system, capsys)["misses"] == [], "what was found whole is no miss"
    other = TEXT[:100] + "On Tuesday a cat came by. " + TEXT[100:]
    send(system, "parts", other)
    send(system, "whole", TEXT, prompt_logprobs=0)
    send(system, "salted", TEXT, cache_salt="x")
    send(system, "stranger", TEXT, tenant="emca")
    assert admin(system, "reset-cache") == 0
    send(system, "again", TEXT)
    capsys.readouterr()
    told = misses(system, capsys)
    found = [(each["request"]["requestId"], each["cause"], each["earlier"]["requestId"]) for each in told["misses"]]
    assert found == [
        ("again", "MISS_CAUSE_NOT_KEPT", "whole"),
        ("stranger", "MISS_CAUSE_OTHER_TENANT", "salted"),
        ("salted", "MISS_CAUSE_OTHER_SALT", "whole"),
        ("whole", "MISS_CAUSE_WHOLE_PROMPT", "goes-on"),
        ("parts", "MISS_CAUSE_PARTED", "goes-on"),
    ]
    parted = told["misses"][-1]
    assert parted["commonText"] + parted["text"] in other
    assert parted["commonText"] + parted["earlierText"] in TEXT
    assert (told["numPrompts"], told["numMisses"]) == (7, 5)
    [miss] = misses(system, capsys, "--tenant", "emca")["misses"]
    assert miss["request"]["requestId"] == "stranger"
    assert admin(system, "misses", "parts") == 0
    out = capsys.readouterr().out
    assert "differs from goes-on from token" in out and "On Tuesday" in out
    assert "1 of the requests computed tokens again" in out
