"""Reads a user's messages: edited lines with a history on a terminal, plain lines from a pipe."""

from __future__ import annotations

import contextlib
import os
import sys

import typer

from blockyard.local.user_folders import state_folder

FENCE = '"""'
_PROMPT, _NEXT_PROMPT = "> ", ". "
_MAX_HISTORY_LINES = 1000


class LineReader:
    """Reads messages from standard input."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._history = _History() if self.is_terminal else None

    def read(self) -> str | None:
        """Reads a message; None: the input has ended. Ctrl-C discards what is typed; twice in a row it ends the input.

        A backslash at the end of a line, or three quotation marks around lines, make a message of several lines.
        """
        was_interrupted = False
        while True:
            try:
                return self._read_message()
            except EOFError:
                # The next line begins below the prompt.
                typer.echo(err=True)
                return None
            except KeyboardInterrupt:
                typer.echo(err=True)
                if was_interrupted or not self.is_terminal:
                    return None
                typer.echo("once more, Ctrl-D or /quit to end", err=True)
                was_interrupted = True

    def _read_message(self) -> str:
        line = self._read_line(_PROMPT).strip()
        if line.startswith(FENCE):
            return self._read_fenced(line.removeprefix(FENCE))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(self._read_line(_NEXT_PROMPT))
        return "\n".join(lines).strip()

    def _read_fenced(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(FENCE):
            lines.append(self._read_line(_NEXT_PROMPT))
        lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
        return "\n".join(lines).strip()

    def _read_line(self, prompt: str) -> str:
        return input(prompt if self.is_terminal else "")

    def close(self) -> None:
        """Keeps the history for the next conversation."""
        if self._history is not None:
            self._history.save()


class _History:
    """The lines of this and earlier conversations, in a file that only this user can read."""

    def __init__(self) -> None:
        import readline  # noqa: PLC0415  importing it changes how a terminal's lines are read

        self._readline = readline
        self._path = state_folder() / "history"
        readline.set_history_length(_MAX_HISTORY_LINES)
        with contextlib.suppress(OSError):
            readline.read_history_file(self._path)

    def save(self) -> None:
        with contextlib.suppress(OSError):
            os.close(os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600))
            self._readline.write_history_file(self._path)
