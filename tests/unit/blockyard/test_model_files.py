"""Finding a model's files: folders, the demo model, and a hub (a small real one, over HTTP). No torch."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from blockyard import model_files
from blockyard.errors import BlockyardError, Reason
from blockyard.model_files import model_digest, resolve_model
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
try:
    print(resolve_model(sys.argv[1], sys.argv[2], sys.argv[3]))
except BlockyardError as error:
    print(error)
assert "torch" not in sys.modules
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"name": name}))
    for name in (
        "model.safetensors",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "original/params.json",
        "checkpoint-9/model.safetensors",
        "checkpoint-9/tokenizer.json",
        "tokenizer_code.py",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode() * 100)
    return folder


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

    def resolve(self, model: str, revision: str, kind: str, **environment: str) -> str:
        settings = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home), "HF_HUB_ETAG_TIMEOUT": "20", **environment}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, model, revision, kind],
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


def test_a_folder_is_taken_as_it_is(repository: Path):
    assert resolve_model(str(repository), "main", "weights") == repository


def test_a_home_folder_is_expanded(repository: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(repository.parent))
    assert resolve_model("~/repository", "", "config") == repository


def test_empty_is_the_demo_model():
    assert resolve_model("", "main", "config") == ROOT / "models" / "demo"


def test_an_absent_demo_model_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(model_files, "DEMO_FOLDER", tmp_path)
    with pytest.raises(BlockyardError, match="pass --model") as caught:
        resolve_model("", "main", "config")
    assert caught.value.reason is Reason.MODEL_NOT_LOADED


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ("{tmp}", "has no config.json"),
        ("{tmp}/some.gguf", "is a file"),
        ("{tmp}/absent", "no folder on this machine"),
        ("./absent", "no folder on this machine"),
        ("a/b/c", "no folder on this machine"),
        ("../x", "no folder on this machine"),
    ],
)
def test_a_wrong_folder_says_what_is_wrong(model: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "some.gguf").touch()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(BlockyardError, match=complaint) as caught:
        resolve_model(model.format(tmp=tmp_path), "main", "weights")
    assert caught.value.reason is Reason.MODEL_NOT_LOADED


def test_the_digest_is_of_the_bytes_of_config_json(repository: Path, tmp_path: Path):
    assert model_digest(repository) == hashlib.sha256((repository / "config.json").read_bytes()).hexdigest()
    with pytest.raises(BlockyardError, match=r"has no config\.json"):
        model_digest(tmp_path)


def test_a_hub_id_downloads_what_the_kind_needs(machine: Machine):
    folder = Path(machine.resolve(NAME, "main", "weights"))
    assert folder.is_relative_to(machine.home)
    assert sorted(machine.hub.fetched) == ["config.json", "generation_config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == b"model.safetensors" * 100

    machine.hub.fetched.clear()
    assert Path(machine.resolve(NAME, "", "tokenizer")) == folder
    assert sorted(machine.hub.fetched) == ["tokenizer.json", "tokenizer_config.json"], "the rest is in the cache"


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


def test_a_missing_hub_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(BlockyardError, match="install it, or give a folder"):
        resolve_model(NAME, "main", "weights")


@pytest.mark.parametrize("model", ["{tmp}/dmeo", "{tmp}/models/../dem"])
def test_a_folder_that_is_misspelt_is_told_which_one_may_be_meant(tmp_path: Path, model: str) -> None:
    for name in ("demo", "models", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "demo" / "config.json").write_text("{}")
    with pytest.raises(BlockyardError, match=r"did you mean .*/demo\?$"):
        resolve_model(model.format(tmp=tmp_path), "", "config")


def test_a_relative_folder_that_is_misspelt_is_not_only_sought_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "demo").mkdir(parents=True)
    (tmp_path / "models" / "demo" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BlockyardError, match=r"models/dmeo .*: did you mean models/demo\?$"):
        resolve_model("models/dmeo", "", "config")
