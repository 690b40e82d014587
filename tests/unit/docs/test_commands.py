"""Every command that a page shows is run by a test, or has a reason why not; services take the flags of the pages."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from blockyard.cli.main import main
from blockyard.configuration import PublicSettings, ReplicaSettings, SystemConfiguration
from blockyard.local.local_system import LocalSystem
from blockyard.settings import load
from gateway.config import GatewayConfiguration
from scheduler_service.config import SchedulerConfiguration
from tests.unit.docs.commands import (
    ALONE,
    HOLDERS,
    OUTPUTS,
    PAGES,
    ROOT,
    SETTINGS,
    By,
    Command,
    beginnings_in,
    blocks_of,
    commands_of,
    held_by,
    holder_of,
    shown,
)
from worker_service.config import WorkerConfiguration

CONFIGURATIONS: dict[str, type[Any]] = {
    "blockyard serve": SystemConfiguration,
    "python -m gateway": GatewayConfiguration,
    "python -m scheduler_service": SchedulerConfiguration,
    "python -m worker_service": WorkerConfiguration,
}
PROGRAM = re.compile(
    r"(\$ |[A-Z_]+=\S+ )*(\.venv/bin/|sudo )?"
    r"(blockyard|make|curl|python3?|pip|docker|kubectl|grpcurl|export|cd|sh|git)\b"
)


def test_every_command_has_a_holder() -> None:
    assert [str(command) for command in shown() if holder_of(command) is None] == [], "say in commands.py who runs it"


def test_every_holder_holds_something() -> None:
    commands = shown()
    for page, rows in HOLDERS.items():
        first_lines = {command.first_line for command in commands if command.page == page}
        gone = [key for key in rows if key not in first_lines and key not in beginnings_in(rows)]
        gone += [key for key in beginnings_in(rows) if not any(line.startswith(key[:-1]) for line in first_lines)]
        assert gone == [], page
    for page, beginnings in OUTPUTS.items():
        texts = [block.text for block in blocks_of((ROOT / page).read_text(encoding="utf-8"))]
        assert all(any(text.startswith(beginning) for text in texts) for beginning in beginnings), page


@pytest.mark.parametrize(
    "test", sorted({row.test for rows in HOLDERS.values() for row in rows.values() if isinstance(row, By)})
)
def test_a_test_that_is_named_exists(test: str) -> None:
    path, _, name = test.partition("::")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_command_hides_in_another_block(page: Path) -> None:
    for block in blocks_of(page.read_text(encoding="utf-8")):
        if block.language is not None:
            assert block.language in ("", "sh", "python", "yaml", "toml", "json"), f"line {block.line}"
        if block.language == "":
            assert not any(PROGRAM.match(line) for line in block.text.splitlines()), f"line {block.line}: say sh"
        if block.language == "yaml":
            assert yaml.safe_load(block.text), f"line {block.line}"
        if block.language == "toml":
            assert tomllib.loads(block.text), f"line {block.line}"


def arguments_of(command: Command) -> tuple[type[Any], list[str]]:
    """The service that a command starts, and what it is given."""
    words = shlex.split(command.text.replace("\\\n", " "), comments=True)
    line = shlex.join(words).removeprefix(".venv/bin/")
    program = next(name for name in CONFIGURATIONS if line.startswith(name))
    return CONFIGURATIONS[program], words[len(program.split()) :]


@pytest.mark.parametrize("command", held_by(SETTINGS.test), ids=str)
def test_a_service_takes_what_it_is_given(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    configuration, arguments = arguments_of(command)
    with pytest.raises(SystemExit) as ended:
        if configuration is SystemConfiguration:
            main(["serve", *arguments, "--print-config"])
        else:
            load(configuration, "documented", "", [*arguments, "--print-config"])
    told = capsys.readouterr()
    assert ended.value.code == 0, told.err
    settings, *_ = yaml.safe_load_all(told.out)
    for flag, value in pairwise(arguments):
        if flag.startswith("--") and not value.startswith("--"):
            assert str(settings[flag[2:].replace("-", "_")]) == value


@pytest.mark.parametrize("command", held_by(ALONE.test), ids=str)
def test_it_works_alone(command: Command) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-e", "-c", command.text],
        cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_pkill_finds_one_service() -> None:
    """The patterns of the guide, and the command lines that `blockyard serve` gives its children."""
    replicas = ReplicaSettings(data_parallel_size=2)
    public = PublicSettings(grpc_port=0, http_port=0, admin_port=0)
    system = LocalSystem(SystemConfiguration(replicas=replicas, public=public))
    lines = {
        service.name: " ".join(("python", "-P", "-m", "blockyard.local.child", "17", service.module, *service.flags))
        for service in system.make_services()
    }
    asyncio.run(system.close())
    guide = (ROOT / "docs" / "guides" / "restart.md").read_text(encoding="utf-8")
    patterns = re.findall(r"'((?:worker_service|blockyard\.local\.child) [^']+)'", guide)
    found = [[name for name, line in lines.items() if re.search(pattern, line)] for pattern in patterns]
    assert found == [["worker-0"], ["scheduler"], ["gateway"]]


SAMPLE = """\
Text, and a list:

- one
    that goes on

    curl a \\
        b          # first
    # a comment

    make c         # after an empty line

```sh
for x in y; do
    echo x
done
```

```
    not a command
```
"""


def test_commands_are_found() -> None:
    found = [(command.line, command.first_line, command.text.count("\n")) for command in commands_of("x.md", SAMPLE)]
    assert found == [(6, "curl a", 1), (10, "make c", 0), (13, "for x in y; do", 2)]
