"""The commands on a terminal, with the real services and the demo model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.kit.processes.terminal import Terminal

if TYPE_CHECKING:
    from pathlib import Path

SMALL = ("--num-device-blocks=60", "--num-host-blocks=0", "--num-threads=1")


def test_run_talks_stops_an_answer_and_keeps_its_history(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    with Terminal("run", "demo", *SMALL, "--temperature=0", environment=environment) as terminal:
        start = terminal.wait_for("> ")
        assert "demo, up to 1024 tokens: /help lists what can be typed" in start
        assert " I worker" not in start, "no lines of a log"
        terminal.type("What does os.path.join do?\n")
        first = terminal.wait_for("\n> ")
        assert len(first.splitlines()) > 2
        terminal.type('/set max_tokens 900\n/set nothing 1\n"""\nTell me\nmore."""\n')
        terminal.wait_for("error: there is no nothing; there are temperature")
        terminal.wait_for(r'more\."""\n.*\w')
        terminal.interrupt()
        terminal.wait_for(r"\(stopped\)\n> ")
        terminal.type("/help\n")
        terminal.wait_for("/clear +forget the conversation")
        terminal.interrupt()
        terminal.wait_for("Ctrl-D or /quit to end")
        terminal.type("/quit\n")
        assert terminal.wait() == 0
    history = tmp_path / "blockyard" / "history"
    assert "What does os.path.join do?" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
