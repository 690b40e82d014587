"""`blockyard serve` in its process: its settings, and what it refuses before it starts anything."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.unit.blockyard.cli.invoking import run

if TYPE_CHECKING:
    from pathlib import Path

Captured = pytest.CaptureFixture[str]


def test_serve_has_all_settings_as_flags(capsys: Captured) -> None:
    assert run("serve", "--help-all") == 0
    out = capsys.readouterr().out
    for flag in ("--model", "--grpc-port", "--max-num-seqs", "--num-device-blocks", "--log-format", "--config"):
        assert flag in out


def test_serve_says_why_it_does_not_take_what_it_chooses(capsys: Captured) -> None:
    assert run("serve", "--worker-address=10.0.0.1:1") == 2
    assert "private sockets" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("arguments", [["m"], ["--model", "m"], ["m", "--model=m"], ["--seed=1", "m"]])
def test_serve_takes_the_model_as_an_argument(arguments: list[str], capsys: Captured) -> None:
    assert run("serve", *arguments, "--print-config") == 0
    assert "model: m\n" in capsys.readouterr().out


def test_serve_refuses_two_models(capsys: Captured) -> None:
    assert run("serve", "one", "--model=two") == 2
    assert "as MODEL and as --model two" in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_serve_prints_its_settings(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "b.yaml"
    file.write_text("max_num_seqs: 7\n")
    assert run("serve", "--config", str(file), "--grpc-port=1", "--print-config") == 0
    out = capsys.readouterr().out
    assert "max_num_seqs: 7\n" in out
    assert "grpc_port: 1\n" in out


def test_serve_prints_the_settings_of_each_of_several_models(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "serve.yaml").write_text("max_num_seqs: 5\nmodels:\n- {model: one}\n- {model: two, max_num_seqs: 6}\n")
    assert run("serve", f"--config={tmp_path}/serve.yaml", "--print-config") == 0
    of_file = capsys.readouterr().out
    assert run("serve", "one", "two", "--print-config") == 0
    of_arguments = capsys.readouterr().out
    for printed, sizes in ((of_file, [5, 6]), (of_arguments, [256, 256])):
        documents = list(yaml.safe_load_all(printed))
        assert [each["model"] for each in documents] == ["one", "two"]
        assert [each["max_num_seqs"] for each in documents] == sizes
    assert run("serve", "one", "two", f"--config={tmp_path}/serve.yaml") == 2
    assert "unknown settings: models" in capsys.readouterr().err
    (tmp_path / "wrong.yaml").write_text("models: [{model: one, http_port: 1}]")
    assert run("serve", f"--config={tmp_path}/wrong.yaml") == 2
    assert "models[0] in" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--max-num-seqs=0"], ["--fly"]])
def test_serve_refuses_what_it_does_not_know(flags: list[str], capsys: Captured) -> None:
    assert run("serve", *flags) == 2
    assert flags[-1].split("=")[0] in capsys.readouterr().err


def test_serve_refuses_a_taken_port_before_it_starts_anything(capsys: Captured) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run("serve", f"--http-port={port}", "--grpc-port=0", "--admin-port=0") == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: cannot listen on 127.0.0.1:{port}")
    assert "--http-port" in err


def test_serve_refuses_a_model_that_is_not_there(capsys: Captured) -> None:
    assert run("serve", "--model=/nowhere/at/all", "--http-port=0", "--grpc-port=0", "--admin-port=0") == 1
    assert capsys.readouterr().err.startswith("error: MODEL_NOT_LOADED: /nowhere/at/all is no folder")
