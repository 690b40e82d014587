"""`blockyard doctor` as a whole: lines, JSON, exit status. Its look at kernels is a process of its own."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import pytest

from blockyard.cli.doctor import kernels
from blockyard.model_files import DEMO_FOLDER
from tests.unit.blockyard.cli.invoking import run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Captured = pytest.CaptureFixture[str]
PORTS = ("--grpc-port=0", "--http-port=0", "--admin-port=0", "--device=cpu")
ANSWER = {
    "torch": "2.13",
    "triton": False,
    "devices": [{"device": "cpu", "name": "AVX2", "kernels": "cpu/avx2", "warnings": []}],
}


@pytest.fixture(autouse=True)
def self_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives an answer in place of a worker's process: these tests need no torch."""
    (tmp_path / "answering.py").write_text(f"print({json.dumps(json.dumps(ANSWER))})\n")
    monkeypatch.setattr(kernels, "MODULE", "answering")
    monkeypatch.setattr(kernels, "ROOT", tmp_path)


def test_every_part_is_told(capsys: Captured) -> None:
    assert run("doctor", *PORTS) == 0
    out = capsys.readouterr().out
    for subject in ("python", "memory", "huge pages", "clock", "torch", "kernels on cpu", "ports"):
        assert subject in out


def test_a_model_that_is_named_is_looked_at(tmp_path: Path, capsys: Captured) -> None:
    assert run("doctor", *PORTS, f"--model={DEMO_FOLDER}") == 0
    assert "LlamaForCausalLM is served" in capsys.readouterr().out
    (tmp_path / "config.json").write_text('{"architectures": ["BloomForCausalLM"]}')
    assert run("doctor", *PORTS, f"--model={tmp_path}", "--model-code=native", "--json") == 1
    failed = [each for each in json.loads(capsys.readouterr().out) if each["level"] == "fail"]
    assert [each["subject"] for each in failed] == ["model", "dialect"]
    assert "'BloomForCausalLM' is not supported" in failed[0]["text"]
    assert "tokenizer" in failed[1]["text"]


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        ("", "its chat template takes system messages and turns in every order"),
        (
            "{% if message.role == 'system' and not loop.first %}{{ raise_exception('first!') }}{% endif %}",
            "later system messages become <system-reminder> in user turns",
        ),
    ],
)
def test_what_becomes_of_system_messages_is_told(tmp_path: Path, capsys: Captured, guard: str, expected: str) -> None:
    template = tmp_path / "chat_template.jinja"
    template.write_text("{% for message in messages %}" + guard + "{{ message.content }}{% endfor %}")
    assert run("doctor", *PORTS, f"--model={DEMO_FOLDER}", f"--chat-template={template}", "--json") == 0
    (roles,) = [each for each in json.loads(capsys.readouterr().out) if each["subject"] == "roles"]
    assert (roles["level"], roles["text"]) == ("ok", expected)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_what_fails_is_told_as_json(tmp_path: Path, taken: int, capsys: Captured) -> None:
    config = tmp_path / "blockyard.yaml"
    config.write_text(f"http_port: {taken}\ngrpc_port: 0\nadmin_port: 0\ndevice: cpu\n")
    nobody = [f"--scheduler-address=unix:{tmp_path}/s", f"--worker-address=unix:{tmp_path}/a+unix:{tmp_path}/b"]
    assert run("doctor", f"--config={config}", "--json", *nobody) == 1
    failed = {each["subject"]: each for each in json.loads(capsys.readouterr().out) if each["level"] == "fail"}
    services = [f"scheduler unix:{tmp_path}/s", f"worker unix:{tmp_path}/a", f"worker unix:{tmp_path}/b"]
    assert set(failed) == {"ports", *services}
    assert str(taken) in failed["ports"]["text"]
    assert all(each["advice"] for each in failed.values())


def test_a_worker_that_cannot_start_is_told(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "answering.py").write_text("raise ImportError('no torch here')\n")
    assert run("doctor", *PORTS) == 1
    assert "no torch here" in capsys.readouterr().out


def test_a_bad_setting_is_a_bad_command_line(capsys: Captured) -> None:
    assert run("doctor", "--max-connections=none") == 2
    assert "--max-connections" in capsys.readouterr().err
