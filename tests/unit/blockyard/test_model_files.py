"""Finding a model's files: folders and the demo model. No torch."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from blockyard import model_files
from blockyard.errors import BlockyardError, Reason
from blockyard.model_files import model_digest, resolve_model

ROOT = Path(__file__).parents[3]


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


def test_a_missing_hub_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(BlockyardError, match="install it, or give a folder"):
        resolve_model("someone/small", "main", "weights")


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
