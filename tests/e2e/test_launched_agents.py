"""`blockyard launch` starts Claude Code and Codex themselves, and each does a task by a call of its tool.

Needs packages from the network.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.kit.processes.system import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

PACKAGES = {"claude": "@anthropic-ai/claude-code", "codex": "@openai/codex"}
ARGUMENTS = {
    "claude": ["-p", "Write the file.", "--allowedTools", "Bash"],
    "codex": ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Write the file."],
}
MAX_MODEL_LEN = 65_536
# Their prompts are long, and the demo model's own template knows no tools.
FLAGS = [
    *("--max-model-len", str(MAX_MODEL_LEN), "--num-device-blocks", "6000", "--device", "cpu"),
    *("--chat-template", str(ROOT / "examples" / "tools.jinja")),
]


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with room for an agent's prompt, which is behind the positions that it was trained on."""
    folder = tmp_path_factory.mktemp("models") / "demo"
    shutil.copytree(ROOT / "models" / "demo", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_MODEL_LEN}))
    return folder


@pytest.mark.parametrize("agent", PACKAGES)
def test_it_does_a_task(long_model: Path, tmp_path: Path, agent: str) -> None:
    install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path / "npm"), PACKAGES[agent]]
    subprocess.run(install, check=True, timeout=600, capture_output=True)
    work, programs = tmp_path / "work", tmp_path / "bin"
    work.mkdir()
    programs.mkdir()
    program = tmp_path / "npm" / "node_modules" / ".bin" / agent
    forced = [sys.executable, str(ROOT / "tests" / "e2e" / "forced_agent.py"), agent, "echo done > written.txt"]
    line = " ".join(f"'{part}'" for part in [*forced, str(program)])
    (programs / agent).write_text(f'#!/bin/sh\nexec {line} "$@"\n')
    (programs / agent).chmod(0o755)
    (tmp_path / "home" / ".codex").mkdir(parents=True)
    environment = os.environ | {
        "HOME": str(tmp_path / "home"),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "IS_SANDBOX": "1",
    }
    launch = [sys.executable, "-m", "blockyard", "launch", agent, "--model", str(long_model), *FLAGS]
    done = subprocess.run(
        [*launch, "--", *ARGUMENTS[agent]],
        cwd=work, env=environment, capture_output=True, text=True, timeout=900, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (work / "written.txt").read_text() == "done\n", done.stdout + done.stderr
