"""The supervisor with small modules as its services, in real processes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from blockyard.local.supervisor import ROOT, Backoff, Service, StartError, Supervisor, _with_model, child_environment

if TYPE_CHECKING:
    from collections.abc import Callable

# What a stand-in does is told by its flags; each writes what it does into the journal of the folder.
STAND_IN = """
import os, signal, subprocess, sys, time

name, *acts = sys.argv[1:]
here = os.path.dirname(__file__)

def note(what):
    with open(os.path.join(here, "journal"), "a") as journal:
        journal.write(f"{name} {what}\\n")

def stop(*_):
    note("stops")
    if "stubborn" in acts:
        return
    for other in (act.removeprefix("after:") for act in acts if act.startswith("after:")):
        while f"{other} stops" not in open(os.path.join(here, "journal")).read():
            time.sleep(0.01)
    if "slow" in acts and not os.path.exists(os.path.join(here, "slow")):
        open(os.path.join(here, "slow"), "w").close()
        return
    sys.exit(0)

signal.signal(signal.SIGTERM, stop)
note(f"starts {os.getpid()}")
if "talk" in acts:
    print("first line", flush=True)
    sys.stderr.write("half a ")
    sys.stderr.flush()
    time.sleep(0.05)
    sys.stderr.write("line\\n" + "x" * 200_000 + "\\nno newline at the end")
    sys.stderr.flush()
    sys.stdout.buffer.write(b"\\xff\\xfe\\n")
    sys.stdout.flush()
if "die" in acts:
    print("\\n".join(f"reason {number}" for number in range(30)))
    sys.exit(3)
if "once" in acts and not os.path.exists(os.path.join(here, "died")):
    open(os.path.join(here, "died"), "w").close()
    sys.exit(4)
if "grandchild" in acts:
    note(f"child {subprocess.Popen(['sleep', '600']).pid}")
open(os.path.join(here, name + ".ready"), "w").close()
while True:
    signal.pause()
"""


class House:
    """A folder with stand-ins, and what they did."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "stand_in.py").write_text(STAND_IN)
        self.lines: list[str] = []
        self.environment = {**os.environ, "PYTHONPATH": str(folder)}

    def service(self, name: str, *acts: str, grace_seconds: float = 20.0) -> Service:
        module = f"stand_in_{name.partition('-')[0]}"
        (self.folder / f"{module}.py").write_text(STAND_IN)
        return Service(name, module, (name, *acts), grace_seconds)

    def supervisor(self, *services: Service, ready: Callable[[], bool] | None = None) -> Supervisor:
        async def is_ready() -> bool:
            if ready is not None:
                return ready()
            return all((self.folder / f"{service.name}.ready").exists() for service in services)

        return Supervisor(
            services,
            is_ready,
            write_line=self.lines.append,
            backoff=Backoff(first_seconds=0.02, max_seconds=0.05),
            environment=self.environment,
            poll_seconds=0.02,
        )

    @property
    def journal(self) -> list[str]:
        path = self.folder / "journal"
        return path.read_text().splitlines() if path.exists() else []

    def pid(self, name: str) -> int:
        """Of its last start."""
        return [int(line.split()[2]) for line in self.journal if line.startswith(f"{name} starts")][-1]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits for another process: by polling, since there is no event to wait for."""
        async with asyncio.timeout(20):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def test_starts_in_order_and_stops_in_the_reverse(house: House) -> None:
    supervisor = house.supervisor(house.service("worker"), house.service("scheduler"), house.service("gateway"))
    assert await supervisor.start()
    supervisor.request_stop()
    assert await supervisor.wait() == 0
    await supervisor.stop()
    assert [line for line in house.journal if "stops" in line] == ["gateway stops", "scheduler stops", "worker stops"]
    assert not any(is_running(child.pid) for child in supervisor.children)
    await supervisor.stop()


async def test_a_log_that_nobody_reads_holds_no_service(house: House) -> None:
    """It writes more than a pipe holds before it says that it is ready."""

    def write_line(line: str) -> None:
        raise BrokenPipeError

    supervisor = house.supervisor(house.service("worker", "talk"))
    supervisor.children[0]._write_line = write_line
    async with asyncio.timeout(20):
        assert await supervisor.start()
    await supervisor.stop()


async def test_a_service_that_cannot_be_watched_ends_the_system(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = house.supervisor(house.service("worker", "once"), ready=lambda: True)
    await supervisor.children[0].start()

    async def wait() -> int:
        raise ValueError("a bug")

    monkeypatch.setattr(supervisor.children[0], "wait", wait)
    await supervisor._watch(supervisor.children[0])
    assert await supervisor.wait() == 1
    assert "a service is not watched any more: stopping" in caplog.text
    monkeypatch.undo()
    await supervisor.stop()


async def test_those_of_one_module_stop_together(house: House) -> None:
    """Each worker ends only after the other one was told to end too."""
    workers = [house.service("worker-0", "after:worker-1"), house.service("worker-1", "after:worker-0")]
    supervisor = house.supervisor(*workers, house.service("gateway"))
    await supervisor.start()
    await supervisor.stop()
    stops = [line for line in house.journal if "stops" in line]
    assert stops[0] == "gateway stops"
    assert sorted(stops[1:]) == ["worker-0 stops", "worker-1 stops"]
    assert [await child.wait() for child in supervisor.children] == [0, 0, 0]


async def test_one_log_of_whole_lines(house: House) -> None:
    supervisor = house.supervisor(house.service("a", "talk"))
    await supervisor.start()
    await house.until(lambda: len(house.lines) >= 5)
    await supervisor.stop()
    assert house.lines[:2] == ["first line", "half a line"]
    assert "".join(house.lines[2:-1]) + house.lines[-1] == "x" * 200_000 + "no newline at the end\ufffd\ufffd"
    assert all(line for line in house.lines)


async def test_a_death_before_all_are_ready_is_an_error_with_its_last_lines(house: House) -> None:
    supervisor = house.supervisor(house.service("worker"), house.service("scheduler", "die"), house.service("gateway"))
    with pytest.raises(StartError) as caught:
        await supervisor.start()
    told = str(caught.value).splitlines()
    assert told[0] == "the scheduler ended with 3 before it was ready:"
    assert told[-1] == "    reason 29"
    assert len(told) == 16
    assert not any(is_running(child.pid) for child in supervisor.children if child.pid)


async def test_a_worker_that_dies_before_all_are_ready_is_an_error_too(house: House) -> None:
    with pytest.raises(StartError, match=r"the worker ended with 4 before it was ready$"):
        await house.supervisor(house.service("worker", "once")).start()


async def test_a_module_that_does_not_exist(house: House) -> None:
    with pytest.raises(StartError, match="No module named nowhere"):
        await house.supervisor(Service("gateway", "nowhere")).start()


async def test_a_signal_before_all_are_ready(house: House) -> None:
    supervisor = house.supervisor(house.service("worker"), house.service("gateway"), ready=lambda: False)
    starting = asyncio.create_task(supervisor.start())
    await house.until(lambda: len(house.journal) == 2)
    supervisor.request_stop()
    assert await starting is False
    assert await supervisor.wait() == 0
    await supervisor.stop()
    assert not any(is_running(child.pid) for child in supervisor.children)


async def test_what_cannot_be_started_again_ends_everything(
    house: House, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = house.supervisor(house.service("worker"), house.service("gateway"))
    await supervisor.start()
    monkeypatch.setattr(sys, "executable", str(house.folder / "nowhere"))
    os.kill(house.pid("gateway"), signal.SIGKILL)
    assert await asyncio.wait_for(supervisor.wait(), 20) == 1
    await supervisor.stop()
    assert "worker stops" in house.journal
    assert caplog.messages == ["a service ended: starting it again", "a service cannot be started: stopping"]


async def test_each_that_dies_is_started_again(house: House) -> None:
    names = ["worker-0", "worker-1", "scheduler", "gateway"]
    supervisor = house.supervisor(*map(house.service, names))
    await supervisor.start()
    before = {name: house.pid(name) for name in names}
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    await house.until(lambda: all(house.pid(name) != before[name] for name in names))
    await supervisor.stop()
    assert not any(is_running(house.pid(name)) for name in names)


async def test_a_worker_that_dies_is_started_again_and_again(house: House, caplog: pytest.LogCaptureFixture) -> None:
    supervisor = house.supervisor(house.service("worker"), house.service("gateway"))
    await supervisor.start()
    for number in (1, 2, 3):
        pid = house.pid("worker")
        (house.folder / "worker.ready").unlink()
        os.kill(pid, signal.SIGKILL)
        await house.until(lambda pid=pid: (house.folder / "worker.ready").exists() and house.pid("worker") != pid)
        assert len(caplog.records) == number
    delays = [record.fields["delay_seconds"] for record in caplog.records]  # type: ignore[attr-defined]
    assert delays == [0.02, 0.04, 0.05]
    assert is_running(house.pid("gateway"))
    await supervisor.stop()
    assert not is_running(house.pid("worker"))


async def test_after_a_long_life_the_first_delay_counts_again(house: House, caplog: pytest.LogCaptureFixture) -> None:
    supervisor = house.supervisor(house.service("worker"))
    supervisor._backoff = Backoff(0.02, 10.0, long_life_seconds=0.0)
    await supervisor.start()
    for _ in range(3):
        pid = house.pid("worker")
        os.kill(pid, signal.SIGKILL)
        await house.until(lambda pid=pid: house.pid("worker") != pid)
    await supervisor.stop()
    assert [record.fields["delay_seconds"] for record in caplog.records] == [0.02] * 3  # type: ignore[attr-defined]


async def test_one_that_does_not_stop_is_killed_with_all_that_it_started(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = house.supervisor(house.service("a", "stubborn", "grandchild", grace_seconds=0.2))
    await supervisor.start()
    await supervisor.stop()
    assert not is_running(house.pid("a"))
    grandchild = next(int(line.split()[2]) for line in house.journal if " child " in line)
    await house.until(lambda: not is_running(grandchild))
    assert "killing a service that does not stop" in caplog.text


async def test_a_second_signal_makes_it_hurry(house: House) -> None:
    supervisor = house.supervisor(house.service("gateway", "slow"))
    await supervisor.start()
    supervisor.request_stop()
    await supervisor.wait()
    stopping = asyncio.create_task(supervisor.stop())
    await house.until(lambda: "gateway stops" in house.journal)
    assert not stopping.done()
    supervisor.request_stop()
    await asyncio.wait_for(stopping, 10)
    assert house.journal.count("gateway stops") == 2


async def test_a_child_gets_no_signal_from_the_terminal(house: House) -> None:
    supervisor = house.supervisor(house.service("a"))
    await supervisor.start()
    assert os.getsid(house.pid("a")) != os.getsid(0)
    await supervisor.stop()


async def test_children_die_with_their_parent_even_when_it_is_killed(house: House) -> None:
    program = house.folder / "parent.py"
    program.write_text(
        textwrap.dedent(
            """
            import asyncio, sys
            from blockyard.local.supervisor import Service, Supervisor

            async def never():
                return False

            asyncio.run(Supervisor([Service(n, "stand_in", (n,)) for n in ("a", "b")], never).start())
            """
        )
    )
    environment = {**house.environment, "PYTHONPATH": f"{house.folder}:{ROOT}"}
    parent = await asyncio.create_subprocess_exec(sys.executable, str(program), env=environment)
    await house.until(lambda: len(house.journal) == 2)
    pids = [house.pid("a"), house.pid("b")]
    assert all(map(is_running, pids))
    parent.kill()
    await parent.wait()
    await house.until(lambda: not any(map(is_running, pids)))
    # Linux signals once more where the children pass to another dying thread of their parent first.
    assert {line for line in house.journal if "stops" in line} == {"a stops", "b stops"}


def test_a_child_whose_parent_is_gone_already_does_nothing(house: House) -> None:
    command = [sys.executable, "-m", "blockyard.local.child", "1", "stand_in", "a"]
    done = subprocess.run(
        command, env=child_environment(house.environment), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "the parent process died before this one started\n"
    assert house.journal == []


def test_a_child_finds_the_package_that_runs_here() -> None:
    assert child_environment({"PYTHONPATH": "/x", "A": "b"}) == {"PYTHONPATH": f"{ROOT}:/x", "A": "b"}
    assert child_environment({}) == {"PYTHONPATH": str(ROOT)}
    assert child_environment({"PYTHONPATH": str(ROOT)}) == {"PYTHONPATH": str(ROOT)}


async def test_services_come_and_go_while_others_run(house: House) -> None:
    supervisor = house.supervisor(house.service("gateway"))
    assert await supervisor.start()
    added = supervisor.add([house.service("worker"), house.service("scheduler")])
    await house.until(lambda: all((house.folder / f"{name}.ready").exists() for name in ("worker", "scheduler")))
    pid = house.pid("worker")
    os.kill(pid, signal.SIGKILL)
    await house.until(lambda: house.pid("worker") != pid)
    await supervisor.remove(added)
    assert [line for line in house.journal if "stops" in line] == ["scheduler stops", "worker stops"]
    assert [child.service.name for child in supervisor.children] == ["gateway"]
    assert is_running(house.pid("gateway"))
    again = supervisor.add([house.service("worker")])
    await house.until(lambda: len([line for line in house.journal if line.startswith("worker starts")]) == 3)
    await supervisor.stop()
    stops = [line for line in house.journal if "stops" in line]
    assert stops[2:] == ["gateway stops", "worker stops"], "what was added stops behind what runs all along"
    assert not is_running(again[0].pid)


async def test_lines_name_the_model_of_their_service(house: House) -> None:
    supervisor = house.supervisor(house.service("gateway"))
    await supervisor.start()
    service = dataclasses.replace(house.service("worker", "talk"), model='my "model"')
    supervisor.add([service])
    await house.until(lambda: len(house.lines) >= 2)
    await supervisor.stop()
    assert house.lines[:2] == ['my "model": first line', 'my "model": half a line']
    written = {"level": "info", "message": "ready"}
    assert json.loads(_with_model(json.dumps(written), service.model)) == {"model": service.model, **written}
