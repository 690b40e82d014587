"""Adapters through the real services: by name, mixed, after processes that die as they load one, and loaded anew."""

from __future__ import annotations

import asyncio
import shutil
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import openai
import pytest

from blockyard import AsyncClient
from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.contract.events import Delta, Recovered
from blockyard.errors import Reason, from_rpc_error
from blockyard.service import faults
from blockyard.service.servers import internal_channel
from tests.kit.kernels.tiny_adapters import make_tiny_adapter, make_tiny_prompt
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.processes.status import state_of
from tests.kit.processes.system import System
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from blockyard.client.results import GenerationOptions

MODEL = "qwen3"
PROMPT = list(range(3, 60))
OPTIONS: GenerationOptions = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
NUM_TOKENS = 240
# One slot less than there are adapters.
SLOTS = ("--max-loras", "2", "--max-cpu-loras", "5", "--max-prompt-adapter-tokens", "8")
FLAGS = ("--dtype", "bfloat16", *SLOTS, "--lora-patience-seconds", "0.05")


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
    for seed, name in enumerate("acd"):
        make_tiny_adapter(root / name, tiny_model(MODEL), seed)
    make_tiny_prompt(root / "b", tiny_model(MODEL), 3)
    flags = [*FLAGS, "--lora-root", str(root), "--lora-modules", "a=a,b=b"]
    worker_flags = ["--num-threads", "1", "--worker-lora-root", str(root)]
    (root / "b" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    # The worker dies with the fourth adapter.
    dies = {"worker": f"{faults.BEFORE_LORA}:kill@4"}
    gateway_flags = ["--gateway-lora-root", str(root)]
    with System(tiny_model(MODEL), tmp_path, flags, worker_flags, gateway_flags, next_faults=dies) as system:
        async with (
            internal_channel(f"127.0.0.1:{system.port('admin')}") as admin,
            openai.AsyncOpenAI(base_url=f"{system.http_url}/v1", api_key="none") as api,
            AsyncClient(system.grpc_target) as client,
        ):
            stub: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(admin)
            await stub.LoadLora(admin_pb2.LoadLoraRequest(name="c", path="c"))
            system.services["scheduler"].wait_for_log("an adapter can be used.* name=b")
            models = {model.id: model.parent async for model in api.models.list()}  # type: ignore[attr-defined]
            base = next(iter(models))
            assert models == {base: None, "a": base, "b": base, "c": base}
            message = [{"role": "user", "content": "hi"}]
            chats = {name: await client.tokenize_chat(message, model=name) for name in ("", "a", "b")}
            assert chats["a"] == chats[""] != chats["b"] == await client.tokenize("hi", add_special_tokens=False)
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
            usages = {name: answer.usage for name, answer in zip(names, answers, strict=True)}
            for name, usage in usages.items():
                assert usage is not None
                assert usage.prompt_tokens == len(PROMPT)
                details = usage.prompt_tokens_details
                assert getattr(details, "virtual_tokens", 0) == (6 if name == "b" else 0)
            with pytest.raises(openai.NotFoundError):
                await api.completions.create(model="d", prompt="x")
            await outlive_a_worker_that_loads(system, stub, client, alone)
            await outlive_a_scheduler_that_loads(system, stub, client, alone)
            await is_loaded_anew(stub, client, root, alone)


@asynccontextmanager
async def undisturbed(client: AsyncClient, alone: dict[str, tuple[int, ...]]) -> AsyncIterator[None]:
    """Answers with adapters, and one without, run meanwhile; they are recovered, and have the tokens that they have."""
    names = ("", "a", "b")
    begun = {name: asyncio.Event() for name in names}
    streams = asyncio.gather(*(follow(client, name, NUM_TOKENS, event) for name, event in begun.items()))
    await asyncio.gather(*(event.wait() for event in begun.values()))
    yield
    assert dict(zip(names, await streams, strict=True)) == {name: (alone[name], True) for name in names}
    assert {model.name for model in await client.list_models() if model.parent} == {"a", "b", "c"}


async def outlive_a_worker_that_loads(
    system: System, stub: admin_pb2_grpc.AdminServiceAsyncStub, client: AsyncClient, alone: dict[str, tuple[int, ...]]
) -> None:
    """It dies as it loads one more adapter, the next one as it loads those that there are; nobody has half of one."""
    async with undisturbed(client, alone):
        loading = stub.LoadLora(admin_pb2.LoadLoraRequest(name="d", path="d"))
        assert await asyncio.to_thread(system.services["worker"].wait) == -signal.SIGKILL
        system.next_faults["worker"] = f"{faults.BEFORE_LORA}:kill@2"
        assert await asyncio.to_thread(system.start_service("worker").wait) == -signal.SIGKILL
        # The one after it stops as it loads the next.
        system.next_faults["worker"] = f"{faults.BEFORE_LORA}:hang@4"
        system.start_service("worker")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await loading
        assert from_rpc_error(caught.value).reason is Reason.NO_READY_WORKER


async def outlive_a_scheduler_that_loads(
    system: System, stub: admin_pb2_grpc.AdminServiceAsyncStub, client: AsyncClient, alone: dict[str, tuple[int, ...]]
) -> None:
    """It dies before the worker has answered; its successor hears of the adapters from the gateway."""
    async with undisturbed(client, alone):
        loading = stub.LoadLora(admin_pb2.LoadLoraRequest(name="d", path="d"))
        worker = system.services["worker"].process
        await until(lambda: state_of(worker.pid) == "T")
        system.services["scheduler"].process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(system.services["scheduler"].wait)
        worker.send_signal(signal.SIGCONT)
        system.start_service("scheduler")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await loading
        assert from_rpc_error(caught.value).reason is Reason.NO_READY_WORKER
    await stub.LoadLora(admin_pb2.LoadLoraRequest(name="d", path="d"))
    assert len({await ids_of(client, "d", 20), *(ids[:20] for ids in alone.values())}) == 5
    await stub.UnloadLora(admin_pb2.UnloadLoraRequest(name="d"))


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
