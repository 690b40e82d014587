"""What goes wrong around the services: told clearly, and outlived where that is possible."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
from typing import TYPE_CHECKING

import pytest

from blockyard import AsyncClient, Client
from blockyard.contract.events import Delta, Recovered
from blockyard.errors import BlockyardError, Reason
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.processes.system import ROOT, Service, System
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from blockyard.client.results import GenerationOptions

FLAGS = ["--dtype", "float32", "--num-device-blocks", "40", "--num-host-blocks", "4"]


PROMPTS = [[5 + number, 6, 7 + 2 * number, *range(20, 20 + 3 * number)] for number in range(16)]
# By number modulo four: greedy, seeded, three of a prompt, and up to a string that its text comes to.
OPTIONS: list[GenerationOptions] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.9, "seed": 12, "n": 3},
    {"temperature": 0.8, "seed": 13, "top_k": 50, "repetition_penalty": 1.2},
]
NUM_TOKENS = 160
recovered: set[int] = set()
Answer = dict[int, tuple[str, tuple[int, ...]]]


def options_of(number: int) -> GenerationOptions:
    return {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True, **OPTIONS[number % 4]}


async def find_stops(client: AsyncClient) -> dict[int, str]:
    """Strings far into the texts of those that are to stop."""
    numbers = range(3, len(PROMPTS), 4)
    answers = await asyncio.gather(*(client.generate(PROMPTS[number], **options_of(number)) for number in numbers))
    return {
        number: answer.text[len(answer.text) * 2 // 3 :][:5] for number, answer in zip(numbers, answers, strict=True)
    }


async def follow(client: AsyncClient, number: int, stop: str | None, progress: list[int]) -> Answer:
    """Reads a stream to its end and gives each sequence's text and ids; every position comes once, in order."""
    options = options_of(number)
    if stop:
        options["stop"] = stop
    texts: dict[int, str] = {}
    ids: dict[int, tuple[int, ...]] = {}
    async for event in client.stream(PROMPTS[number], **options):
        if isinstance(event, Delta):
            texts[event.index] = texts.get(event.index, "") + event.text
            ids[event.index] = ids.get(event.index, ()) + event.token_ids
            assert event.num_tokens == len(ids[event.index])
            assert event.num_text_bytes == len(texts[event.index].encode())
            progress[number] = event.num_tokens
        elif isinstance(event, Recovered):
            assert event.exact and event.num_replayed_tokens >= len(PROMPTS[number])
            recovered.add(number)
    return {index: (texts[index], ids[index]) for index in sorted(ids)}


async def follow_all(client: AsyncClient, stops: dict[int, str], progress: list[int]) -> list[Answer]:
    streams = (follow(client, number, stops.get(number), progress) for number in range(len(PROMPTS)))
    return await asyncio.gather(*streams)


async def test_streams_go_on_where_their_worker_was_killed(tmp_path: Path) -> None:
    with System(tiny_model("llama"), tmp_path, [*FLAGS, "--debug-integrity"]) as system:
        async with AsyncClient(system.grpc_target) as client:
            stops = await find_stops(client)
            undisturbed = await follow_all(client, stops, [0] * len(PROMPTS))
            recovered.clear()
            progress = [0] * len(PROMPTS)
            streams = asyncio.create_task(follow_all(client, stops, progress))
            for _ in range(3):
                before = sum(progress)
                await until(lambda: sum(progress) > before + 250)  # noqa: B023
                assert not streams.done()
                system.services["worker"].stop(signal.SIGKILL)
                system.start_service("worker")
            assert await streams == undisturbed
        assert len(recovered) >= len(PROMPTS) // 2
        assert len(re.findall(r" W .*the worker was lost .*num_requests=[1-9]", system.log("scheduler"))) == 3


async def test_streams_go_on_where_their_worker_was_stopped(tmp_path: Path) -> None:
    """It is given up, taken over in a new epoch when it goes on, and what it says of the old one changes nothing."""
    flags = [*FLAGS, "--debug-integrity", "--step-deadline-seconds", "1.5"]
    with System(tiny_model("llama"), tmp_path, flags) as system:
        async with AsyncClient(system.grpc_target) as client:
            undisturbed = await follow_all(client, {}, [0] * len(PROMPTS))
            progress = [0] * len(PROMPTS)
            streams = asyncio.create_task(follow_all(client, {}, progress))
            await until(lambda: sum(progress) > 250)
            worker, scheduler = system.services["worker"], system.services["scheduler"]
            log_length = len(scheduler.log)
            worker.process.send_signal(signal.SIGSTOP)
            try:
                await until(lambda: "was not answered within 1.5 s" in scheduler.log[log_length:])
                await until(lambda: "readiness ready=False" in system.services["gateway"].log)
            finally:
                worker.process.send_signal(signal.SIGCONT)
            assert await streams == undisturbed
    assert re.search(r" ready epoch=2", scheduler.log)
    assert "a step was refused" not in system.log("worker")


def test_unreachable_worker_is_waited_for(tmp_path: Path) -> None:
    system = System(tiny_model("llama"), tmp_path, FLAGS)
    try:
        scheduler = system.start_service("scheduler")
        system.start_service("gateway")
        scheduler.wait_for_log("no worker answers")
        system.services["gateway"].wait_for_log("no worker answers")
        with Client(system.grpc_target) as client, pytest.raises(BlockyardError) as raised:
            client.generate("x", max_tokens=1, timeout=2.0)
        assert raised.value.reason is Reason.NO_READY_WORKER
        assert "no worker answers" in raised.value.message
        system.start_service("worker")
        system.wait_until_ready()
        with Client(system.grpc_target) as client:
            assert client.generate("x", max_tokens=2, ignore_eos=True).usage.num_completion_tokens == 2
    finally:
        system.__exit__()


@pytest.mark.parametrize("flag", ["--grpc-port", "--http-port", "--admin-port"])
def test_taken_port_is_an_error(flag: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"--grpc-port": "0", "--http-port": "0", "--admin-port": "0", flag: str(taken.getsockname()[1])}
        arguments = [part for pair in ports.items() for part in pair]
        model = ["--model", str(ROOT / "models" / "demo"), "--scheduler-address", f"unix:{tmp_path}/s"]
        gateway = Service("gateway", [*model, *arguments], tmp_path / "log")
        assert gateway.wait() == 1
        assert str(taken.getsockname()[1]) in gateway.log
        assert "Traceback" not in gateway.log


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def truncate_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def remove_shard(folder: Path) -> None:
    sorted(folder.glob("model-*.safetensors"))[-1].unlink()


def change_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["UnheardOfForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        ("llama", truncate_weights, r"model\.safetensors"),
        ("llama_sharded", remove_shard, r"model-0000\d-of-0000\d\.safetensors"),
        ("llama", change_architecture, r"UnheardOfForCausalLM.*supported: Llama,"),
    ],
)
def test_damaged_weights_are_told_and_the_repaired_folder_loads(
    kind: str, damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    """Nobody is ready, everybody says why, and nobody ends."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model(kind), model)
    damage(model)
    system = System(model, tmp_path / "logs", FLAGS)
    try:
        for name in ("worker", "scheduler", "gateway"):
            system.start_service(name)
        system.services["gateway"].wait_for_log(rf"ready=False .*{message}")
        assert all(service.process.poll() is None for service in system.services.values())
        shutil.rmtree(model)
        shutil.copytree(tiny_model(kind), model)
        if damage is not change_architecture:  # a gateway reads config.json once, when it starts
            system.wait_until_ready()
    finally:
        system.__exit__()


@pytest.mark.parametrize("module", ["gateway", "scheduler_service"])
def test_folder_without_config_is_an_error_at_once(module: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), model)
    remove_config(model)
    addresses = {
        "gateway": ["--grpc-port", "0", "--http-port", "0", "--admin-port", "0"],
        "scheduler_service": ["--worker-address", f"unix:{tmp_path}/w"],
    }[module]
    flags = ["--model", str(model), "--scheduler-address", f"unix:{tmp_path}/s", *addresses]
    service = Service(module, flags, tmp_path / "log")
    if module == "gateway":
        assert service.wait() == 1
        assert "config.json" in service.log
        assert "Traceback" not in service.log
    else:
        # A scheduler needs no file of the model: its worker tells what is missing.
        service.wait_for_log("not ready")
        service.stop()
