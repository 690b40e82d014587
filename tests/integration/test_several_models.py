"""Several models behind one address on one machine: they take turns, and nothing is lost whatever dies."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from blockyard import AsyncClient
from tests.kit.chaos.model_switches import MODELS, Plan, run_switches, switched_system
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.processes.system import ROOT
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.mark.timeout(240)
async def test_three_models_with_places_for_two_lose_nothing_whatever_dies(tmp_path: Path) -> None:
    plan = Plan(seed=4, num_requests=36, num_streams=9, num_different=3, num_kills=6, turn_seconds=1.0)
    report = await run_switches(plan, tmp_path / "log")
    assert not report.failures, str(report)
    assert report.num_answers == dict.fromkeys(MODELS, 12)
    assert report.kills.total() == 6
    # The models that answered last alone are loaded at the beginning; the other one can only be loaded by a switch.
    assert report.loads[MODELS[0]] > 0


@pytest.mark.timeout(120)
async def test_an_idle_model_is_unloaded_and_loaded_again(tmp_path: Path) -> None:
    async with (
        switched_system(tmp_path / "log", idle_unload_seconds=0.5) as switched,
        AsyncClient(switched.system.endpoints.local) as client,
    ):
        answers: list[str] = []
        for _ in range(2):
            answers.append((await client.generate([5, 6, 7], model="qwen2", max_tokens=8, temperature=0.0)).text)
            await until(lambda: [child.service.name for child in switched.supervisor.children] == ["gateway"], 30)
        assert answers[0] == answers[1] != ""
        assert switched.loads == {"qwen2": 2}


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`blockyard serve` with two models and a place for one, in a process of its own; its first lines."""
    for variable in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / variable).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / variable))
    flags = ["--max-loaded-models=1", "--num-device-blocks=60", "--num-host-blocks=0", "--num-threads=1"]
    ports = ["--grpc-port=0", "--http-port=0", "--admin-port=0"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "blockyard", "serve", "demo", str(tiny_model("llama")), *flags, *ports],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdout is not None
        told = ""
        while "python -c" not in told:
            line = process.stdout.readline()
            assert line, (tmp_path / "log").read_text()
            told += line
        yield told
        process.terminate()
        assert process.wait(30) == 0
        process.stdout.close()


def blockyard(*arguments: str) -> str:
    """Runs a command and returns what it writes."""
    command = [sys.executable, "-m", "blockyard", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(180)
def test_commands_know_all_models_of_a_system(served: str, tmp_path: Path) -> None:
    assert "ready: demo, llama, loaded at the first request, 1 at a time" in served
    folder = str(tiny_model("llama"))
    assert json.loads(blockyard("ps", "--json"))[0]["state"] == "ready, none loaded"
    for model, loaded in ((folder, "llama"), ("demo", "demo")):
        # The system that runs has both: no other one is started.
        assert blockyard("run", model, "one two", "--max-tokens=4", "--temperature=0").strip()
        [system] = json.loads(blockyard("ps", "--json"))
        assert system["state"] == f"ready, {loaded} loaded"
    frame = blockyard("top", "--once", "--interval=0.1", "--model=demo", "--admin-address", system["admin"])
    states = {line.split()[0]: line.split()[1] for line in frame.splitlines() if line.startswith(("demo ", "llama "))}
    assert states == {"demo": "ready", "llama": "not"}
    assert "replica state" in frame
    log = (tmp_path / "log").read_text()
    assert "llama: " in log
    assert "demo: " in log
    assert blockyard("stop") == f"stopped {system['name']}\n"
