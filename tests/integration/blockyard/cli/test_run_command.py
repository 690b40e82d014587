"""`blockyard run` with its services as processes, which a fake gateway stands in for."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from blockyard import Client
from blockyard.contract.models import Task
from blockyard.local.registry import list_systems
from tests.unit.blockyard.cli.invoking import run
from tests.unit.blockyard.local.test_registry import make_entry, write

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kit.fakes.fake_gateway import FakeGateway

Captured = pytest.CaptureFixture[str]


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


@pytest.mark.parametrize(
    ("words", "piped", "answer"),
    [
        (["one", "two"], "", "one two one"),
        (["one two"], "", "one two one"),
        ([], "one two\n", "one two one"),
        (["one"], "two\n", "one two one"),
    ],
)
def test_only_the_answer_is_written(
    fake_services: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    words: list[str],
    piped: str,
    answer: str,
) -> None:
    pipe(monkeypatch, piped)
    assert run("run", "demo", *words, "--max-tokens=3") == 0
    assert capsys.readouterr() == (answer + "\n", "")
    assert list_systems() == []


def test_without_a_prompt_and_a_terminal_it_says_what_is_missing(
    fake_services: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    pipe(monkeypatch, "")
    assert run("run", "demo") == 2
    assert "there is no prompt" in capsys.readouterr().err


def test_a_service_that_cannot_start_is_an_error(
    fake_services: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (fake_services / "stand_in_gateway.py").write_text("print('no weights'); raise SystemExit(9)")
    pipe(monkeypatch, "hello")
    assert run("run") == 1
    assert capsys.readouterr().err == "error: the gateway ended with 9 before it was ready:\n    no weights\n"
    assert list_systems() == []


def test_a_model_that_pools_is_refused(fake_services: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    list_models = Client.list_models
    monkeypatch.setattr(Client, "list_models", lambda self: [replace(list_models(self)[0], task=Task.EMBED)])
    pipe(monkeypatch, "hello")
    assert run("run") == 1
    assert "it is to embed: serve it with `blockyard serve`" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["/nowhere/at/all", "nobody here"])
def test_a_model_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: Captured, model: str) -> None:
    pipe(monkeypatch, "hello")
    assert run("run", model) == 1
    assert capsys.readouterr().err.startswith(f"error: MODEL_NOT_LOADED: {model} is no folder")


def test_a_system_that_is_still_starting_is_an_error(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    write(make_entry("one", local=gateway.target))
    gateway.ready = False
    pipe(monkeypatch, "hello")
    assert run("run", "demo") == 1
    assert capsys.readouterr().err == (
        "error: NO_READY_WORKER: the system is still starting: `blockyard ps` says when it is ready\n"
    )
