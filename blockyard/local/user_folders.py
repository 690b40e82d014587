"""The folders of this user that outlive a command: running systems, logs and the history of chats."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """Returns the folder of logs and of the chats' history, readable by this user alone."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return _make(Path(base) / "blockyard")


def systems_folder() -> Path:
    """Returns the folder of running systems, which is empty after a restart of the machine where there is one."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return _make(Path(runtime) / "blockyard") if os.path.isdir(runtime) else _make(state_folder() / "systems")


def logs_folder() -> Path:
    """Returns the folder of the logs of systems in the background."""
    return _make(state_folder() / "logs")


def _make(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
