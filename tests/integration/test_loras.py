"""Adapters through the real services: by name, mixed, after a killed worker, and loaded anew under load."""

from __future__ import annotations

import asyncio
import shutil
import signal
from typing import TYPE_CHECKING

import openai
import pytest

from blockyard import AsyncClient
from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.client.results import Delta, Recovered
from blockyard.service.servers import internal_channel
from tests.kit.kernels.tiny_adapters import make_tiny_adapter
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.processes.system import System

if TYPE_CHECKING:
    from pathlib import Path

    from blockyard.client.results import GenerationOptions

MODEL = "qwen3"
PROMPT = list(range(3, 60))
OPTIONS: GenerationOptions = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
NUM_TOKENS = 60
# One slot less than there are adapters.
FLAGS = ("--dtype", "bfloat16", "--max-loras", "2", "--max-cpu-loras", "5", "--lora-patience-seconds", "0.05")


async def ids_of(client: AsyncClient, name: str, num_tokens: int) -> tuple[int, ...]:
    options: GenerationOptions = {**OPTIONS, "max_tokens": num_tokens}
    if name:
        options["model"] = name
    return (await client.generate(PROMPT, **options)).token_ids


async def follow(client: AsyncClient, name: str, num_tokens: int, begun: asyncio.Event) -> tuple[tuple[int, ...], bool]:
    """Reads an answer as it comes; returns its ids, and whether it was recovered, exactly."""
    ids: tuple[int, ...] = ()
    exact = False
    options: GenerationOptions = {**OPTIONS, "max_tokens": num_tokens}
    if name:
        options["model"] = name
    async for event in client.stream(PROMPT, **options):
        if isinstance(event, Delta):
            ids += event.token_ids
            begun.set()
        elif isinstance(event, Recovered):
            exact = event.exact
    return ids, exact


async def test_adapters_are_served_by_name_and_outlive_their_worker(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    for seed, name in enumerate(("a", "b", "c")):
        make_tiny_adapter(root / name, tiny_model(MODEL), seed)
    flags = [*FLAGS, "--lora-root", str(root), "--lora-modules", "a=a,b=b"]
    worker_flags = ["--num-threads", "1", "--worker-lora-root", str(root)]
    with System(tiny_model(MODEL), tmp_path, flags, worker_flags) as system:
        admin = internal_channel(f"127.0.0.1:{system.port('admin')}")
        stub: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(admin)
        api = openai.AsyncOpenAI(base_url=f"{system.http_url}/v1", api_key="none")
        async with AsyncClient(system.grpc_target) as client:
            await stub.LoadLora(admin_pb2.LoadLoraRequest(name="c", path="c"))
            system.services["scheduler"].wait_for_log("an adapter can be used.* name=b")
            models = {model.id: model.parent async for model in api.models.list()}  # type: ignore[attr-defined]
            base = next(iter(models))
            assert models == {base: None, "a": base, "b": base, "c": base}
            names = ("", "a", "b", "c")
            alone = {name: await ids_of(client, name, NUM_TOKENS) for name in names}
            assert len(set(alone.values())) == 4, "the adapters change nothing"
            # All at once, by the OpenAI client too.
            together = await asyncio.gather(*(ids_of(client, name, NUM_TOKENS) for name in names))
            assert dict(zip(names, together, strict=True)) == alone
            extra = {"ignore_eos": True, "return_token_ids": True}
            answers = await asyncio.gather(
                *(
                    api.completions.create(
                        model=name or base, prompt=PROMPT, max_tokens=40, temperature=0, extra_body=extra
                    )
                    for name in names
                )
            )
            assert [answer.model for answer in answers] == [base, *names[1:]]
            told = [tuple(answer.choices[0].token_ids) for answer in answers]  # type: ignore[attr-defined]
            assert told == [alone[name][:40] for name in names]
            with pytest.raises(openai.NotFoundError):
                await api.completions.create(model="d", prompt="x")
            await outlives_its_worker(system, client, alone)
            await is_loaded_anew(stub, client, root, alone)
        await api.close()
        await admin.close()


async def outlives_its_worker(system: System, client: AsyncClient, alone: dict[str, tuple[int, ...]]) -> None:
    """Another worker reads the adapters again, and the answers go on to the bit."""
    begun = {name: asyncio.Event() for name in ("", "a", "b")}
    streams = asyncio.gather(*(follow(client, name, NUM_TOKENS, event) for name, event in begun.items()))
    await asyncio.gather(*(event.wait() for event in begun.values()))
    system.services["worker"].process.send_signal(signal.SIGKILL)
    await asyncio.to_thread(system.services["worker"].wait)
    system.start_service("worker")
    for name, (ids, exact) in zip(begun, await streams, strict=True):
        assert (ids, exact) == (alone[name], True), name


async def is_loaded_anew(
    stub: admin_pb2_grpc.AdminServiceAsyncStub, client: AsyncClient, root: Path, alone: dict[str, tuple[int, ...]]
) -> None:
    """Under one name: who runs keeps the old content, who comes gets the new one and none of the old one's KV."""
    shutil.copytree(root / "c", root / "new")
    begun = asyncio.Event()
    running = asyncio.create_task(follow(client, "a", NUM_TOKENS, begun))
    await begun.wait()
    await stub.LoadLora(admin_pb2.LoadLoraRequest(name="a", path="new", load_inplace=True))
    assert await ids_of(client, "a", NUM_TOKENS) == alone["c"]
    assert (await running)[0] == alone["a"]
    listed = (await stub.ListLoras(admin_pb2.ListLorasRequest())).loras
    assert {lora.name: lora.digest for lora in listed}["a"] == {lora.name: lora.digest for lora in listed}["c"]
    await stub.UnloadLora(admin_pb2.UnloadLoraRequest(name="a"))
    assert "a" not in [model.name for model in await client.list_models()]
