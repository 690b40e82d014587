"""The help of every command on a terminal of 80 columns."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from typer.main import get_command

from blockyard.cli.main import app
from tests.unit.blockyard.cli.invoking import run

if TYPE_CHECKING:
    from collections.abc import Iterator

Captured = pytest.CaptureFixture[str]
WIDTH = 80


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from walk(below, (*path, name))


COMMANDS: list[tuple[tuple[str, ...], Any]] = list(walk(get_command(app)))


def names_of(command: Any) -> list[str]:
    shown = [each for each in command.params if not getattr(each, "hidden", False)]
    return [name for each in shown for name in (*each.opts, *each.secondary_opts) if name.startswith("-")]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(path) or "blockyard" for path, _ in COMMANDS])
def test_help_shows_every_name_whole(path: tuple[str, ...], command: Any, capsys: Captured) -> None:
    has_more = "--help-all" in names_of(command)
    assert run(*path, "--help-all" if has_more else "--help") == 0
    out = capsys.readouterr().out
    words = re.split(r"[\s,]+", out)
    assert [name for name in names_of(command) if name not in words] == []
    assert [name for name in getattr(command, "commands", {}) if name not in words] == []
    assert [line for line in out.splitlines() if len(line) > WIDTH] == []
    assert "…" not in out
    assert out.splitlines()[0].startswith("Usage: " + " ".join(("blockyard", *path)))


def test_common_options_come_first_and_the_others_with_help_all(capsys: Captured) -> None:
    assert run("serve", "--help") == 0
    short = capsys.readouterr().out
    assert run("serve", "--help-all") == 0
    whole = capsys.readouterr().out
    assert len(short.splitlines()) < 60
    for name in ("--max-model-len", "--http-port", "--api-keys-file"):
        assert name in short
        assert whole.index(name) < whole.index("--device-cache-gib")
    assert "--device-cache-gib" not in short
    num_more = sum(bool(getattr(each, "rich_help_panel", None)) for each in dict(COMMANDS)[("serve",)].params)
    assert f"{num_more} more options: blockyard serve --help-all" in short


def test_the_commands_stand_in_sections(capsys: Captured) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert out.index("Systems on this machine:") < out.index("  serve ") < out.index("Calls of a running system:")
    assert "--tls-authority" not in out
