"""Several models behind one address on one machine: they take turns, and nothing is lost whatever dies."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx
import pytest

from blockyard import AsyncClient
from tests.kit.chaos.model_switches import MODELS, Plan, run_switches, switched_system
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.processes.user import blockyard, serving
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
        log = tmp_path / "log"
        await until(lambda: log.read_text().count("the model was unloaded") == 2, 30)
        assert "lost the scheduler" not in log.read_text()


@pytest.mark.timeout(120)
async def test_a_load_by_name_is_as_one_for_a_request(tmp_path: Path) -> None:
    async with (
        switched_system(tmp_path / "log", max_loaded_models=1) as switched,
        httpx.AsyncClient(base_url=f"http://{switched.system.endpoints.http}", timeout=60) as http,
    ):

        async def states(model: str = "") -> list[str]:
            """The states of all models; checks that the scheduler's part is there for a loaded model alone."""
            status = (await http.get("/status", params={"model": model} if model else {})).json()
            told = {each["name"]: each["state"].removeprefix("MODEL_STATE_") for each in status["models"]}
            assert ("scheduler" in status) == (told[model or MODELS[0]] == "READY")
            return [told[name] for name in MODELS]

        assert await states() == ["UNLOADED"] * 3
        for name, expected in ((MODELS[1], ["UNLOADED", "READY"]), (MODELS[0], ["READY", "UNLOADED"])):
            answer = await http.post("/v1/models/load", json={"model": name})
            assert (answer.status_code, answer.json()["id"]) == (200, name)
            assert await states(name) == [*expected, "UNLOADED"]
        refused = await http.post("/v1/models/load", json={"model": "other"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "MODEL_NOT_FOUND")
        assert switched.loads == {MODELS[0]: 1, MODELS[1]: 1}


@pytest.mark.timeout(120)
async def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    # More blocks than any machine has memory for.
    async with (
        switched_system(tmp_path / "log", num_device_blocks=2**31) as switched,
        httpx.AsyncClient(base_url=f"http://{switched.system.endpoints.http}", timeout=60) as http,
    ):
        answer = await http.post("/v1/models/load", json={"model": MODELS[0]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "NO_READY_WORKER")
        failed, *others = (await http.get("/status")).json()["models"]
        assert (failed["state"], failed["starts_on_demand"]) == ("MODEL_STATE_FAILED", True)
        assert failed["message"] and failed["message"] in answer.json()["error"]["message"]
        assert [each["state"] for each in others] == ["MODEL_STATE_UNLOADED"] * 2


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`blockyard serve` with two models and a place for one, in a process of its own; its first lines."""
    for variable in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / variable).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / variable))
    flags = ["--max-loaded-models=1", "--num-device-blocks=60", "--num-host-blocks=0", "--num-threads=1"]
    ports = ["--grpc-port=0", "--http-port=0", "--admin-port=0"]
    with serving(tmp_path, "demo", str(tiny_model("llama")), *flags, *ports) as told:
        yield told


@pytest.mark.timeout(180)
def test_commands_know_all_models_of_a_system(served: str, tmp_path: Path) -> None:
    assert "ready: demo, llama, loaded at the first request, 1 at a time" in served
    folder = str(tiny_model("llama"))
    assert json.loads(blockyard("ps", "--json").stdout)[0]["state"] == "ready, none loaded"
    for model, loaded in ((folder, "llama"), ("demo", "demo")):
        # The system that runs has both: no other one is started.
        assert blockyard("run", model, "one two", "--max-tokens=4", "--temperature=0").stdout.strip()
        [system] = json.loads(blockyard("ps", "--json").stdout)
        assert system["state"] == f"ready, {loaded} loaded"
    frame = blockyard("top", "--once", "--interval=0.1", "--model=demo", "--admin-address", system["admin"]).stdout
    states = {line.split()[0]: line.split()[1] for line in frame.splitlines() if line.startswith(("demo ", "llama "))}
    assert states == {"demo": "loaded", "llama": "not"}
    assert "replica state" in frame
    typed = "/model\n/model other\n/model llama\n/model\none two\n"
    chat = blockyard("chat", "--target", system["grpc"], "--max-tokens=4", "--temperature=0", typed=typed)
    told = (chat.stderr + chat.stdout).splitlines()
    assert [line.rstrip() for line in told[1:]][:6] == [
        "* demo",
        "  llama",
        "error: there is no other; there are demo, llama",
        "llama answers from now on",
        "  demo",
        "* llama",
    ]
    assert "".join(told[7:]).strip()
    [system] = json.loads(blockyard("ps", "--json").stdout)
    assert system["state"] == "ready, llama loaded"
    log = (tmp_path / "log").read_text()
    assert "llama: " in log
    assert "demo: " in log
    assert blockyard("stop").stdout == f"stopped {system['name']}\n"
