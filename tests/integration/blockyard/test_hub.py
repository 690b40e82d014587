"""Models of a hub: a small real one, over HTTP, asked by processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kit.fakes.fake_hub import FakeHub, fake_hub

if TYPE_CHECKING:
    from collections.abc import Iterator


ROOT = Path(__file__).parents[3]
NAME = "someone/small"
# Hub settings are read when its library is imported, so each case is a process of its own.
PROGRAM = """
import sys
from blockyard.errors import BlockyardError
from blockyard.model_files import resolve_model
def watch(done, total):
    seen.append((done, total))
seen = []
try:
    print(resolve_model(sys.argv[1], sys.argv[2], sys.argv[3], watch if sys.argv[4:] else None))
    if sys.argv[4:]:
        assert seen == sorted(seen)
        print(*seen[-1])
except BlockyardError as error:
    print(error)
assert "torch" not in sys.modules
"""


@pytest.fixture
def hub(repository: Path) -> Iterator[FakeHub]:
    folders = {NAME: repository, "someone/gated": repository, "someone/empty": repository / "original"}
    with fake_hub(folders, gated=frozenset({"someone/gated"})) as hub:
        yield hub


class Machine:
    """Runs `resolve_model` in processes that share one cache and know one hub."""

    def __init__(self, hub: FakeHub, home: Path) -> None:
        self.hub = hub
        self.home = home

    def resolve(self, model: str, revision: str, kind: str, *watched: str, **environment: str) -> str:
        settings = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home), "HF_HUB_ETAG_TIMEOUT": "20", **environment}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, model, revision, kind, *watched],
            cwd=ROOT,
            env={**kept, **settings},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert "%" not in done.stderr, "no progress bar where nobody watches"
        return done.stdout.strip()


@pytest.fixture
def machine(hub: FakeHub, tmp_path: Path) -> Machine:
    return Machine(hub, tmp_path / "home")


def test_a_hub_id_downloads_what_the_kind_needs(machine: Machine):
    folder = Path(machine.resolve(NAME, "main", "weights"))
    assert folder.is_relative_to(machine.home)
    expected = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(machine.hub.fetched) == expected, "a worker follows grammars by its tokenizer's tokens"
    assert (folder / "model.safetensors").read_bytes() == b"model.safetensors" * 100

    machine.hub.fetched.clear()
    assert Path(machine.resolve(NAME, "", "tokenizer")) == folder
    assert sorted(machine.hub.fetched) == ["tokenizer_config.json"], "the rest is in the cache"


def test_a_download_reports_its_bytes(machine: Machine):
    folder, last = machine.resolve(NAME, "main", "all", "watched").splitlines()
    size = sum(path.stat().st_size for path in Path(folder).iterdir())
    assert last == f"{size} {size}"
    assert {path.name for path in Path(folder).iterdir()} >= {"tokenizer_config.json", "model.safetensors"}


def test_offline_uses_the_cache_and_says_what_it_lacks(machine: Machine):
    told = machine.resolve(NAME, "main", "config", HF_HUB_OFFLINE="1")
    assert "MODEL_NOT_LOADED" in told
    assert "HF_HUB_OFFLINE" in told
    folder = machine.resolve(NAME, "main", "config")
    machine.hub.fetched.clear()
    assert machine.resolve(NAME, "main", "config", HF_HUB_OFFLINE="1") == folder
    assert machine.hub.fetched == []


def test_a_commit_is_a_revision(machine: Machine):
    folder = machine.resolve(NAME, machine.hub.commit(NAME), "config")
    assert Path(folder).name == machine.hub.commit(NAME)


@pytest.mark.parametrize(
    ("model", "revision", "complaint"),
    [
        ("someone/absent", "main", "check the name"),
        (NAME, "absent", "has no revision absent"),
        ("someone/gated", "main", "accept its terms"),
        ("someone/empty", "main", "not a language model"),
    ],
)
def test_what_the_hub_refuses_is_told(machine: Machine, model: str, revision: str, complaint: str):
    told = machine.resolve(model, revision, "weights")
    assert told.startswith("MODEL_NOT_LOADED")
    assert complaint in told


def test_a_hub_that_cannot_be_reached_is_told(machine: Machine):
    told = machine.resolve(NAME, "main", "weights", HF_ENDPOINT="http://127.0.0.1:9")
    assert told.startswith("MODEL_NOT_LOADED")
    assert "cannot be reached" in told


def test_a_connection_that_breaks_is_told(machine: Machine):
    machine.hub.resets.add("model.safetensors")
    told = machine.resolve(NAME, "main", "weights")
    assert told.startswith("MODEL_NOT_LOADED")
    assert "could not be downloaded from the hub (the connection broke): try again" in told
