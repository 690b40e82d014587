"""Who finds whose prefix in the prefix cache: tenants, and requests with a salt, through the real services."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx

from blockyard import Client
from blockyard.security.keys import Key, add_key, digest
from tests.integration.conftest import DEMO
from tests.kit.processes.system import System

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FLAGS = ("--dtype", "float32", "--num-device-blocks", "200", "--block-size", "16")
PROMPT = list(range(3, 67))
# The last token is always computed.
NUM_CACHED = len(PROMPT) - 1
TENANTS = ("acme", "emca")


@contextmanager
def keyed_system(folder: Path, *gateway_flags: str) -> Iterator[System]:
    for tenant in TENANTS:
        add_key(folder / "keys.yaml", Key(name=tenant, sha256=digest(f"key-of-{tenant}"), tenant=tenant))
    flags = [f"--api-keys-file={folder / 'keys.yaml'}", *gateway_flags]
    with System(DEMO, folder / "logs", FLAGS, gateway_flags=flags) as system:
        yield system


def ask(system: System, tenant: str = "", path: str = "completions", **fields: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer key-of-{tenant}"} if tenant else {}
    body = {"model": "demo", "temperature": 0, **fields}
    return httpx.post(f"{system.http_url}/v1/{path}", json=body, headers=headers, timeout=60)


def cached_tokens(system: System, tenant: str = "", **fields: Any) -> int:
    """Sends the prompt; returns how many of its tokens were found, as the usage tells."""
    answer = ask(system, tenant, prompt=PROMPT, max_tokens=1, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_tenants_find_their_own_prefixes_and_not_those_of_others(tmp_path: Path) -> None:
    with keyed_system(tmp_path) as system:
        assert [cached_tokens(system, tenant) for tenant in TENANTS] == [0, 0]
        assert [cached_tokens(system, tenant) for tenant in TENANTS] == [NUM_CACHED, NUM_CACHED]
        # A salt that two tenants give is two salts.
        assert [cached_tokens(system, tenant, cache_salt="x") for tenant in TENANTS] == [0, 0]
        assert cached_tokens(system, "acme", cache_salt="x") == NUM_CACHED
        with Client(system.grpc_target, api_key="key-of-acme") as client:
            found = [
                client.generate(PROMPT, max_tokens=1, cache_salt=salt).choices[0].usage.num_cached_tokens
                for salt in ("x", "y", "y")
            ]
        assert found == [NUM_CACHED, 0, NUM_CACHED]


def test_tenants_share_prefixes_where_that_is_set(tmp_path: Path) -> None:
    with keyed_system(tmp_path, "--share-prefixes") as system:
        assert [cached_tokens(system, tenant) for tenant in TENANTS] == [0, NUM_CACHED]
        assert [cached_tokens(system, tenant, cache_salt="x") for tenant in TENANTS] == [0, NUM_CACHED]


def test_a_salt_goes_with_a_request_over_the_death_of_the_scheduler(tmp_path: Path) -> None:
    """What is computed again then is found by those of its salt alone."""
    with System(DEMO, tmp_path / "logs", FLAGS) as system:
        with Client(system.grpc_target) as client:
            stream = client.stream(PROMPT, max_tokens=200, temperature=0.0, ignore_eos=True, cache_salt="x")
            for number, _ in enumerate(stream):
                if number == 3:
                    system.services["scheduler"].stop(signal.SIGKILL)
                    system.start_service("scheduler")
        assert [cached_tokens(system, cache_salt=salt) for salt in ("y", "x")] == [0, NUM_CACHED]
        assert [cached_tokens(system), cached_tokens(system)] == [0, NUM_CACHED]


def test_a_salt_changes_no_answer(demo: System) -> None:
    answers = [
        ask(demo, prompt=PROMPT, max_tokens=30, **fields).json()["choices"][0]["text"]
        for fields in (
            {},
            {"cache_salt": "x"},
            {"cache_salt": "x"},
            {"cache_salt": "\u00e9" * 256},
        )
    ]
    assert len(set(answers)) == 1


def test_every_front_of_openai_takes_a_salt(demo: System) -> None:
    """The prompts are longer than a block, so that the second call of a salt finds the first one's."""
    text = "the quick brown fox jumps over the lazy dog " * 4
    calls: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
        "responses": {"input": text, "max_output_tokens": 1},
    }
    details = {"chat/completions": "prompt_tokens_details", "responses": "input_tokens_details"}
    for path, fields in calls.items():
        found: list[int] = []
        for salt in ("a", "b", "b"):
            answer = ask(demo, path=path, **fields, cache_salt=f"{path} {salt}")
            assert answer.status_code == 200, answer.text
            found.append(answer.json()["usage"][details[path]]["cached_tokens"])
        assert found[:2] == [0, 0]
        assert found[2] > 0
