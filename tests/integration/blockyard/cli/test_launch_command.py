"""`blockyard launch` with a program in place of an agent, and a fake gateway in place of the services."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from blockyard.local.registry import list_systems
from tests.unit.blockyard.cli.invoking import run
from tests.unit.blockyard.local.test_registry import make_entry, write

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kit.fakes.fake_gateway import FakeGateway

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a program named claude on the path, and nothing else that could be an agent."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    program = tmp_path / "bin" / "claude"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\necho "$ANTHROPIC_MODEL at $ANTHROPIC_BASE_URL with $ANTHROPIC_AUTH_TOKEN: $*"\nexit 7\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)


def test_it_starts_a_system_for_the_agent_and_ends_with_it(fake_services: Path, capfd: Captured) -> None:
    assert run("launch", "claude", "--model", "demo", "--", "-p", "two words") == 7, "the agent's own exit code"
    out, err = capfd.readouterr()
    assert out.startswith("fake at http://127.0.0.1:")
    assert out.endswith(" with unused: -p two words\n")
    assert "warning: fake takes 64 tokens at most" in err
    assert list_systems() == []


@pytest.mark.parametrize("chosen", [[], ["--system=one"], ["--model=demo"]])
def test_it_uses_the_system_that_runs(chosen: list[str], gateway: FakeGateway, capfd: Captured) -> None:
    write(make_entry("one", local=gateway.target))
    assert run("launch", "claude", *chosen) == 7
    assert capfd.readouterr().out == "fake at http://127.0.0.1:2 with unused: \n"
    assert run("--api-key=key", "launch", "claude", "--print", *chosen, "--", "-x") == 0
    lines = capfd.readouterr().out.splitlines()
    assert "export ANTHROPIC_AUTH_TOKEN=key" in lines
    assert lines[-1] == "claude -x"


def test_what_is_missing_is_said(gateway: FakeGateway, capfd: Captured) -> None:
    cases = [
        (["claude"], "no system runs here: name a --model to start"),
        (["claude", "--print", "--model=demo"], "start one with `blockyard up`"),
        (["codex"], "codex is not installed: npm install -g @openai/codex"),
        (["claude", "--system=one"], "no system one runs here"),
    ]
    for arguments, complaint in cases:
        assert run("launch", *arguments) == 1
        assert complaint in capfd.readouterr().err
    assert run("launch", "cursor") == 2
    write(make_entry("one", local=gateway.target, needs_key=True))
    assert run("launch", "claude") == 1
    assert "the system one asks for a key" in capfd.readouterr().err
    write(make_entry("two"))
    assert run("launch", "claude") == 1
    assert "several systems run here, say --system: one, two" in capfd.readouterr().err
