"""README's first steps exactly as they stand, default ports and all: in a network of its own, which Linux gives."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.docs.commands import AS_IT_STANDS, ROOT, Command, held_by, shown

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

# Serves by the page's own command; then what comes on standard input, once it told that it serves.
SCRIPT = """\
set -e
ip link set lo up
{serve} >served &
until grep -q '^ready: ' served; do kill -0 $!; sleep 0.2; done
status=0
sh -e steps || status=$?
kill -TERM $!
wait $!
exit $status
"""


def steps_of_readme(folder: Path) -> str:
    """README's commands and programs that ask what is served, as one script."""
    lines: list[str] = []
    for number, command in enumerate(shown()):
        if command.page == "README.md" and command.language == "python":
            (folder / f"step{number}.py").write_text(command.text, encoding="utf-8")
            lines.append(f"python step{number}.py")
        elif command.page == "README.md" and command.first_line.startswith("curl"):
            lines.append(command.text)
    assert len(lines) == 3
    return "\n".join(lines)


@pytest.mark.parametrize("command", held_by(AS_IT_STANDS.test), ids=str)
def test_the_first_steps_as_they_stand(command: Command, tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "steps").write_text(steps_of_readme(tmp_path), encoding="utf-8")
    # Without the remark behind it, which would be one on what follows here as well.
    script = SCRIPT.format(serve=shlex.join(shlex.split(command.text, comments=True)))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["unshare", "--user", "--net", "--map-root-user", "sh", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "NO_PROXY": "*"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.quote(script)}\n{done.stdout}\n{done.stderr}"
    # Sampled without a seed: what it writes may come to an end by itself.
    assert re.search(r'"finish_reason": ?"(length|stop)"', done.stdout), done.stdout
