"""`blockyard admin` and `blockyard top`, as an operator calls them."""

from __future__ import annotations

import gzip
import io
import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from blockyard.admin.v1 import admin_pb2
from blockyard.cli.admin import commands as admin_commands
from blockyard.cli.top import command as top_command
from blockyard.common.v1 import administration_pb2, status_pb2
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.local.supervisor import ROOT
from tests.kit.fakes.fake_admin import FakeAdmin
from tests.unit.blockyard.cli.invoking import run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Captured = pytest.CaptureFixture[str]
TRACE = json.dumps({"traceEvents": [{"ph": "X", "name": "step"}]}).encode()


@pytest.fixture
def admin() -> Iterator[FakeAdmin]:
    with FakeAdmin() as running:
        running.profile = gzip.compress(TRACE)
        yield running


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as this where there is no terminal."""
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here takes time to happen."""
    monkeypatch.setattr(admin_commands, "RATE_SECONDS", 0.0)
    monkeypatch.setattr(admin_commands, "POLL_SECONDS", 0.0)


def ask(admin: FakeAdmin, *arguments: str) -> int:
    return run("admin", *arguments, "--admin-address", admin.address)


# What it tells.


def test_status_lists_everything(admin: FakeAdmin, capsys: Captured) -> None:
    assert ask(admin, "status") == 0
    out = capsys.readouterr().out
    for told in (
        *("0123456789abcdef", "ready", "1 h 1 min", "1.2.3", "1,234", "1,000"),
        *("10.0.0.7:50070", "feedc0ffee", "NVIDIA H200", "3.0 GiB", "100 GiB + 1.0 GiB", "running"),
        # Rates come from two readings.
        *("750 of 1,000", "0 of 100", " 400 ", "256"),
    ):
        assert told in out, told


def test_status_is_json_where_asked_for(admin: FakeAdmin, capsys: Captured) -> None:
    assert ask(admin, "status", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["gateway"]["ready"] is True
    [replica] = told["scheduler"]["replicas"]
    # What has no value is told too.
    assert (replica["replicaId"], replica["drainState"]) == (0, "DRAIN_STATE_UNSPECIFIED")
    assert replica["workers"][0]["state"] == "WORKER_STATE_RUNNING"


def test_status_says_what_is_wrong(admin: FakeAdmin, capsys: Captured) -> None:
    admin.status.gateway.ready = False
    admin.status.gateway.message = "no worker answers at 10.0.0.7:50070"
    replica = admin.status.scheduler.replicas[0]
    replica.ready = False
    replica.workers[0].message = "the worker is loading [the model]: 7 %"
    assert ask(admin, "status") == 0
    out = capsys.readouterr().out
    assert "gateway: no worker answers at 10.0.0.7:50070" in out
    assert "replica 0: the worker is loading [the model]: 7 %" in out
    assert "not ready" in out


def test_status_without_a_scheduler(admin: FakeAdmin, capsys: Captured) -> None:
    admin.status.ClearField("scheduler")
    assert ask(admin, "status") == 0
    assert "0123456789abcdef" in capsys.readouterr().out


def test_dump_is_json(admin: FakeAdmin, capsys: Captured) -> None:
    assert ask(admin, "dump", "--max-requests", "5") == 0
    assert admin.asked[0].max_requests == 5
    assert json.loads(capsys.readouterr().out)["requests"][0]["requestId"] == "r1"


# What it changes.


def test_drain_waits_for_the_end(admin: FakeAdmin, capsys: Captured) -> None:
    assert ask(admin, "drain", "0") == 0
    assert admin.asked[0].replica == "0"
    captured = capsys.readouterr()
    assert captured.out == "replica 0 is drained\n"
    assert "goes on at other replicas" in captured.err


def test_drain_says_what_the_only_replica_does(admin: FakeAdmin, capsys: Captured) -> None:
    assert ask(admin, "drain", "10.0.0.7:50070") == 0
    assert "finishes what it has" in capsys.readouterr().err


def test_drain_of_the_gateway_waits_for_its_readers(admin: FakeAdmin, capsys: Captured) -> None:
    assert ask(admin, "drain", "gateway") == 0
    captured = capsys.readouterr()
    assert captured.out == "the gateway is drained\n"
    assert "2 answers are read here" in captured.err


def test_drain_need_not_wait(admin: FakeAdmin, capsys: Captured) -> None:
    assert ask(admin, "drain", "0", "--no-wait") == 0
    assert capsys.readouterr().out == ""
    assert ask(admin, "drain", "0", "--no-wait", "--json") == 0
    assert json.loads(capsys.readouterr().out)["handsOver"] is True


def test_drain_gives_up_waiting(admin: FakeAdmin, capsys: Captured) -> None:
    assert ask(admin, "drain", "0", "--timeout", "0") == 1
    assert "it goes on draining" in capsys.readouterr().err


def test_drain_does_not_wait_for_a_scheduler_that_forgot(admin: FakeAdmin, capsys: Captured) -> None:
    admin.forgets_drains = True
    assert ask(admin, "drain", "0") == 1
    assert "the scheduler was restarted" in capsys.readouterr().err


def test_undrain(admin: FakeAdmin, capsys: Captured) -> None:
    assert ask(admin, "undrain", "0") == 0
    assert ask(admin, "undrain", "gateway") == 0
    assert capsys.readouterr().out == "replica 0 is drained no more\nthe gateway is drained no more\n"


def test_reset_cache_tells_what_stays(admin: FakeAdmin, capsys: Captured) -> None:
    assert ask(admin, "reset-cache") == 0
    out = capsys.readouterr().out
    assert "3,456" in out and "in use" in out
    assert ask(admin, "reset-cache", "0") == 0
    assert "in use" not in capsys.readouterr().out
    assert [request.replica for request in admin.asked] == ["", "0"]


def test_misses_are_of_the_model_that_is_named(admin: FakeAdmin, capsys: Captured) -> None:
    assert run("admin", "--model", "small", "misses", "req-17", "--admin-address", admin.address) == 0
    assert (admin.metadata["blockyard-model"], admin.asked[0].request_id) == ("small", "req-17")
    told = "4 requests with 1,000 prompt tokens, 82% of them cached; 0 of the requests computed tokens again"
    assert capsys.readouterr().out.strip() == told


def test_log_level(admin: FakeAdmin, capsys: Captured) -> None:
    assert ask(admin, "log-level", "debug", "gateway") == 0
    out = capsys.readouterr().out
    assert "gateway" in out and "info" in out and "debug" in out
    assert admin.asked[0].level == administration_pb2.LOG_LEVEL_DEBUG
    # One that could not be told is an error.
    assert ask(admin, "log-level", "info") == 1
    assert "the worker does not answer" in capsys.readouterr().out
    assert ask(admin, "log-level", "loud") == 2


# Profiles.


@pytest.mark.parametrize(("name", "is_plain"), [("trace.json", True), ("trace.json.gz", False), ("trace", False)])
def test_profile_writes_a_file(admin: FakeAdmin, capsys: Captured, tmp_path: Path, name: str, is_plain: bool) -> None:
    path = tmp_path / name
    flags = ["--seconds", "0", "--output", str(path), "--detail", "operations", "--max-steps", "9"]
    assert ask(admin, "profile", "0", *flags) == 0
    data = path.read_bytes()
    # Packed, it has the second in which it was packed.
    assert (data if is_plain else gzip.decompress(data)) == TRACE
    assert capsys.readouterr().out == f"{path}: 1,234 steps of w feedc0ffee\n"
    start, stop = admin.asked
    assert (start.replica, start.options.max_steps) == ("0", 9)
    assert start.options.detail == administration_pb2.PROFILE_DETAIL_OPERATIONS
    assert stop.replica == "0"


def test_profile_has_a_name_of_its_own(
    admin: FakeAdmin, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ask(admin, "profile", "--seconds", "0", "--json") == 0
    assert json.loads(capsys.readouterr().out)["numSteps"] == 1234
    [path] = tmp_path.glob("blockyard-profile-*.json.gz")
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_profile_fetches_one_that_runs(admin: FakeAdmin, capsys: Captured, tmp_path: Path) -> None:
    admin.errors["StartProfile"] = BlockyardError(Reason.WRONG_STATE, "a profile is recorded already: stop it first")
    path = tmp_path / "trace.json"
    assert ask(admin, "profile", "--seconds", "0", "--output", str(path)) == 1
    assert "stop it first" in capsys.readouterr().err
    assert ask(admin, "profile", "--fetch", "--output", str(path)) == 0
    assert path.read_bytes() == TRACE


def test_profile_that_cannot_be_written(admin: FakeAdmin, capsys: Captured, tmp_path: Path) -> None:
    assert ask(admin, "profile", "--seconds", "0", "--output", str(tmp_path / "no" / "trace.json")) == 2
    assert "no" in capsys.readouterr().err
    # Nothing was begun.
    assert admin.asked == []


# Errors.


def test_errors_are_told_in_a_line(admin: FakeAdmin, capsys: Captured) -> None:
    admin.errors["DrainReplica"] = invalid([Violation("replica", "there is no replica '7'; there are: 0 (unix:/w)")])
    assert ask(admin, "drain", "7") == 1
    assert capsys.readouterr().err == "error: FIELD_INVALID: replica: there is no replica '7'; there are: 0 (unix:/w)\n"


def test_nobody_there(admin: FakeAdmin, capsys: Captured) -> None:
    admin.stop()
    assert ask(admin, "status") == 1
    assert "--admin-address" in capsys.readouterr().err
    assert run("top", "--once", "--admin-address", admin.address) == 1


def test_a_key_goes_along(admin: FakeAdmin, capsys: Captured) -> None:
    assert run("--api-key", "by-secret", "admin", "status", "--json", "--admin-address", admin.address) == 0
    assert "by-secret" in admin.metadata["authorization"]


def test_help_names_the_commands(capsys: Captured) -> None:
    assert run("admin", "--help") == 0
    out = capsys.readouterr().out
    for command in ("status", "drain", "undrain", "reset-cache", "log-level", "profile", "dump"):
        assert command in out


def commands_of_the_guide() -> list[list[str]]:
    """The lines of the guides that call the program, up to a pipe or a comment."""
    guides = (ROOT / f"docs/guides/{name}.md" for name in ("operate", "sleep", "weights"))
    lines = [line for guide in guides for line in guide.read_text(encoding="utf-8").splitlines()]
    told = [line.strip() for line in lines if line.startswith("    blockyard ")]
    called = [line.partition("|")[0].partition("#")[0] for line in told]
    return [shlex.split(line)[1:] for line in called if line.split()[1] in ("admin", "top")]


@pytest.mark.parametrize("arguments", commands_of_the_guide(), ids=" ".join)
def test_what_the_guide_says_works(
    admin: FakeAdmin, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(admin_commands, "time", SimpleNamespace(sleep=lambda _: None, monotonic=time.monotonic))
    if "--admin-address" in arguments:
        del arguments[arguments.index("--admin-address") :]
    # Of several processes one cannot be told there.
    failed = ["admin", "log-level", "debug"]
    assert run(*arguments, "--admin-address", admin.address) == (arguments == failed)


def test_the_guide_has_commands() -> None:
    assert len(commands_of_the_guide()) > 10


# Memory and weights.


def test_sleep_and_wake_tell_what_they_did(admin: FakeAdmin, capsys: Captured) -> None:
    assert run("admin", "sleep", "0", "--level", "2", "--mode", "abort", "--admin-address", admin.address) == 0
    assert "gave up 1.0 GiB, and holds 2.0 MiB still" in capsys.readouterr().out
    wanted = admin_pb2.SleepReplicaRequest(replica="0", level=2, mode=admin_pb2.LEAVE_MODE_ABORT)
    assert admin.asked == [wanted]
    assert run("admin", "wake", "--tag", "kv_cache", "--admin-address", admin.address) == 0
    assert "replica 0 is asleep still: weights" in capsys.readouterr().out
    assert run("admin", "wake", "--reload", "--admin-address", admin.address) == 0
    assert "replica 0 is awake" in capsys.readouterr().out


def test_an_update_tells_each_replica(admin: FakeAdmin, capsys: Captured) -> None:
    arguments = ["update", "2", "/models/new", "--replica", "0", "--replica", "1", "--together", "--mode", "wait"]
    assert run("admin", *arguments, "--admin-address", admin.address) == 0
    assert capsys.readouterr().out.splitlines() == [f"replica {number} computes with 2" for number in (0, 1)]
    [request] = admin.asked
    assert (request.model, request.together, request.mode) == ("/models/new", True, admin_pb2.LEAVE_MODE_WAIT)


# Top.


def test_top_writes_one_frame(admin: FakeAdmin, capsys: Captured) -> None:
    assert run("top", "--once", "--interval", "0.1", "--admin-address", admin.address) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for told in (
        *("blockyard 1.2.3", "ready", "up 1 h 1 min", "1,234 live", "1,000 waiting (1,234,567 tokens)"),
        *("1,000 out a second", "5,000 in, 50% of them cached", "first token 42.0 ms", "between tokens 8.10 ms"),
        *("75%", "80%", "1 min 15 s ago, replica 0: the worker was lost; 5 requests, 4,321 tokens again"),
    ):
        assert told in out, f"{told}:\n{out}"


def test_top_into_a_pipe_is_one_frame_too(admin: FakeAdmin, capsys: Captured) -> None:
    assert run("top", "--interval", "0.1", "--admin-address", admin.address) == 0
    assert capsys.readouterr().out.count("blockyard 1.2.3") == 1


def test_top_shows_what_is_wrong(admin: FakeAdmin, capsys: Captured) -> None:
    replica = admin.status.scheduler.replicas[0]
    replica.ready, replica.workers[0].state = False, status_pb2.WORKER_STATE_UNREACHABLE
    replica.workers[0].message = "no worker answers at 10.0.0.7:50070"
    second = admin.status.scheduler.replicas.add(replica_id=1, ready=True, drain_state=status_pb2.DRAIN_STATE_DRAINED)
    second.workers.add(message="the replica was drained")
    assert run("top", "--once", "--interval", "0.1", "--admin-address", admin.address) == 0
    out = capsys.readouterr().out
    assert "replica 0: no worker answers at 10.0.0.7:50070 (unreachable)" in out
    assert "not ready" in out and "drained" in out
    # Who was drained is no trouble.
    assert "the replica was drained" not in out


def test_a_replica_of_several_workers_tells_of_each(admin: FakeAdmin, capsys: Captured) -> None:
    replica = admin.status.scheduler.replicas[0]
    first = replica.workers[0]
    first.world_size, first.message = 2, "no worker answers at 10.0.0.8:50070"
    replica.workers.add(
        rank=1, world_size=2, address="10.0.0.8:50070", state=status_pb2.WORKER_STATE_UNREACHABLE, message="gone"
    )
    assert run("top", "--once", "--interval", "0.1", "--admin-address", admin.address) == 0
    out = capsys.readouterr().out
    assert "replica 0: no worker answers at 10.0.0.8:50070 (running)" in out
    assert "replica 0, rank 1: gone (unreachable)" in out
    assert run("admin", "status", "--admin-address", admin.address) == 0
    out = capsys.readouterr().out
    for told in ("0, rank 0", "10.0.0.7:50070", "0, rank 1", "10.0.0.8:50070", "replica 0, rank 1: gone"):
        assert told in out, f"{told}:\n{out}"


def test_top_survives_what_it_watches(admin: FakeAdmin) -> None:
    view = top_command.View(admin.address)
    view.read()
    admin.stop()
    frame = view.next_frame()
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(frame)
    text = console.export_text()
    assert "does not answer" in text
    # What was seen last stays.
    assert "1,234 live" in text


def test_top_on_a_terminal_goes_on_until_it_is_stopped(admin: FakeAdmin) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "blockyard.cli.main", "top", "--interval", "0.1", "--admin-address", admin.address],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
    )
    os.close(theirs)
    try:
        seen = read_until(ours, lambda text: text.count("blockyard") >= 3)
        admin.status.scheduler.replicas[0].ready = False
        seen = read_until(ours, lambda text: "not ready" in text)
        admin.stop()
        seen = read_until(ours, lambda text: "does not answer" in text)
        assert "\x1b[" in seen
        process.send_signal(signal.SIGINT)
        read_until(ours, lambda text: False)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_q_leaves_top_and_the_terminal_is_as_it_was(admin: FakeAdmin) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [sys.executable, "-m", "blockyard.cli.main", "top", "--interval", "60", "--admin-address", admin.address],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
    )
    try:
        read_until(ours, lambda text: "blockyard" in text)
        os.write(ours, b"xq")
        assert process.wait(20) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(theirs)
        os.close(ours)


def read_until(terminal: int, condition: Callable[[str], bool], seconds: float = 20.0) -> str:
    """Reads what is on a terminal, up to what it waits for or to its end."""
    text, deadline = "", time.monotonic() + seconds
    while not condition(text):
        assert time.monotonic() < deadline, text
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            text += os.read(terminal, 1 << 16).decode(errors="replace")
        except OSError:
            # The other side is closed.
            break
    return text
