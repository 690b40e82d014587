"""The commands on a terminal, with the real services and the demo model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.local.registry import list_systems
from tests.kit.processes.terminal import Terminal

if TYPE_CHECKING:
    from pathlib import Path

SMALL = ("--num-device-blocks=60", "--num-host-blocks=0", "--num-threads=1")
FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--admin-port=0")


def test_run_talks_stops_an_answer_and_keeps_its_history(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    with Terminal("run", "demo", *SMALL, "--temperature=0", environment=environment) as terminal:
        start = terminal.wait_for("> ")
        assert "demo, up to 1024 tokens: /help lists what can be typed" in start
        assert " I worker" not in start, "no lines of a log"
        terminal.type("What does os.path.join do?\n")
        first = terminal.wait_for("\n> ")
        assert len(first.splitlines()) > 2
        # So hot that it ends itself long after it is stopped.
        terminal.type("/set max_tokens 900\n/set temperature 2\n/set seed 1\n")
        terminal.type('/set nothing 1\n"""\nTell me\nmore."""\n')
        terminal.wait_for("error: there is no nothing; there are temperature")
        terminal.wait_for(r'more\."""\n.*\w')
        terminal.interrupt()
        terminal.wait_for(r"\(stopped\)\n> ")
        terminal.type("/help\n")
        # The prompt is back: Ctrl-C meets no printing.
        terminal.wait_for(r"/clear +forget the conversation(?s:.*)\n> ")
        terminal.interrupt()
        terminal.wait_for("Ctrl-D or /quit to end")
        terminal.type("/quit\n")
        assert terminal.wait() == 0
    history = tmp_path / "blockyard" / "history"
    assert "What does os.path.join do?" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_serve_shows_bars_and_no_log() -> None:
    with Terminal("serve", "demo", *SMALL, *FREE_PORTS) as terminal:
        start = terminal.wait_for("ready: demo(.|\n)*python -c")
        assert "starting" in start
        assert " I " not in start
        terminal.interrupt()
        assert terminal.wait() == 0
    assert list_systems() == []


def test_serve_logs_on_a_terminal_if_it_is_asked_to() -> None:
    with Terminal("serve", "demo", "--log-format=text", *SMALL, *FREE_PORTS) as terminal:
        assert " I scheduler" in terminal.wait_for("ready: demo")
        terminal.interrupt()
        assert terminal.wait() == 0
