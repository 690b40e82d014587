"""`launch` sets an agent's variables and flags."""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path

import pytest

from blockyard.cli.agents import make_launch
from blockyard.contract.models import Model

MODEL = Model("owner/it's", 40_000, 100, True, "", True)
URL = "http://127.0.0.1:8000"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_claude_finds_its_models_by_every_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "a secret of another server")
    launch = make_launch("claude", URL, "key", MODEL)
    environment = launch.make_environment()
    assert environment["ANTHROPIC_BASE_URL"] == URL
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "key"
    names = [name for name in environment if name.startswith("ANTHROPIC_") and name.endswith("_MODEL")]
    assert len(names) == 4
    assert {environment[name] for name in names} == {MODEL.name}
    assert "ANTHROPIC_API_KEY" not in environment
    assert "PATH" in environment


def test_codex_gets_settings_as_flags_and_a_catalog() -> None:
    launch = make_launch("codex", URL, "key", MODEL)
    program, *flags = launch.command
    assert program == "codex"
    assert flags[::2] == ["-c"] * 8
    settings = tomllib.loads("\n".join(flags[1::2]))
    provider = settings["model_providers"][settings["model_provider"]]
    assert provider["base_url"] == f"{URL}/v1"
    assert launch.environment == {provider["env_key"]: "key"}
    (known,) = json.loads(Path(settings["model_catalog_json"]).read_text())["models"]
    assert (known["slug"], known["context_window"]) == (settings["model"], 40_000)


def test_opencode_gets_a_provider_in_its_environment() -> None:
    launch = make_launch("opencode", URL, "key", MODEL)
    assert launch.command == ["opencode"]
    content = json.loads(launch.environment["OPENCODE_CONFIG_CONTENT"])
    name, _, model = content["model"].partition("/")
    provider = content["provider"][name]
    assert provider["options"] == {"baseURL": f"{URL}/v1", "apiKey": "key"}
    assert provider["models"][model]["limit"]["context"] == 40_000


def test_what_is_printed_can_be_run_by_a_shell() -> None:
    lines = make_launch("claude", URL, "a key", MODEL).describe().splitlines()
    assert lines[0] == "unset ANTHROPIC_API_KEY"
    assert "export ANTHROPIC_AUTH_TOKEN='a key'" in lines
    (model,) = [line for line in lines if line.startswith("export ANTHROPIC_MODEL=")]
    assert shlex.split(model)[1] == f"ANTHROPIC_MODEL={MODEL.name}"
    assert lines[-1] == "claude"
