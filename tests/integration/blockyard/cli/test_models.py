"""`pull`, `ls`, `show` and `rm` with a small real hub, over HTTP."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from blockyard.model_files import DEMO_FOLDER
from tests.kit.fakes.fake_hub import FakeHub, fake_hub
from tests.kit.processes.user import User

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SMALL, STRANGE = "someone/small", "someone/strange"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    strange = tmp_path_factory.mktemp("strange")
    shutil.copytree(DEMO_FOLDER, strange, dirs_exist_ok=True)
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps({**config, "attention_bias": True, "rope_parameters": "odd"}))
    with fake_hub({SMALL: DEMO_FOLDER, STRANGE: strange}) as hub:
        yield hub


@pytest.fixture
def user(hub: FakeHub, tmp_path: Path) -> User:
    return User(tmp_path / "state", HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "hub"), HF_HUB_ETAG_TIMEOUT="20")


def test_a_model_comes_and_goes(user: User) -> None:
    (demo,) = json.loads(user.call("ls", "--json").stdout)
    assert (demo["name"], demo["architecture"], demo["refusal"]) == ("demo", "LlamaForCausalLM", "")

    facts = json.loads(user.call("show", SMALL, "--json").stdout)
    assert (facts["weights"], facts["served"]) == ("not here", "yes")
    (_, known) = json.loads(user.call("ls", "--json").stdout)
    assert known["refusal"] == f"its weights are not here: blockyard pull {SMALL}"

    pulled = user.call("pull", SMALL)
    assert pulled.stdout.startswith(f"{SMALL} is here: 10.6 MiB, LlamaForCausalLM, served")
    assert pulled.stderr == "", "no bar where nobody watches"
    row = user.call("ls").stdout.splitlines()[2]
    assert row.split()[0] == SMALL
    assert row.rstrip().endswith("yes")
    shown = user.call("show", SMALL).stdout
    assert "weights       here" in shown
    assert "5.4 million" in shown

    assert "say --yes" in user.call("rm", SMALL, code=2).stderr
    assert user.call("rm", SMALL, "--yes").stdout.startswith(f"deleted {SMALL}: 10.")
    assert len(json.loads(user.call("ls", "--json").stdout)) == 1
    assert "see `blockyard ls`" in user.call("rm", SMALL, "--yes", code=2).stderr


def test_what_cannot_be_served_is_not_downloaded(user: User, hub: FakeHub) -> None:
    hub.fetched.clear()
    err = user.call("pull", STRANGE, code=1).stderr
    assert "is not downloaded, since it cannot be served: " in err
    assert "rope_parameters" in err
    assert "model.safetensors" not in hub.fetched
    refused = user.call("show", STRANGE, code=1).stdout
    assert "served        no: " in refused
    assert "rope_parameters" in refused


def test_a_hub_that_does_not_answer_is_one_line(tmp_path: Path) -> None:
    user = User(tmp_path / "state", HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path / "hub"))
    assert user.call("pull", SMALL, code=1).stderr.count("\n") == 1
