"""Adapters at a scheduler with fake workers: loaded, named by requests, replaced, and there after any death."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from blockyard.admin.v1 import admin_pb2
from blockyard.errors import BlockyardError, Reason, from_rpc_error
from blockyard.lora.virtual_tokens import virtual_ids
from scheduler_service.replicas.loras.replica_loras import ReplicaLoras
from tests.kit.fakes.fake_loras import SOFT_TOKENS, digest_of
from tests.kit.oracles.token_oracle import oracle, until_idle
from tests.kit.processes.scrape import Scrape
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from scheduler_service.config import SchedulerConfiguration
    from tests.kit.fakes.token_client import Stream, TokenClient
    from tests.unit.scheduler_service.conftest import Harness, Operator

    Settings = Callable[..., SchedulerConfiguration]

PROMPT = [5, 4, 3, 2, 1] * 8


async def add(client: TokenClient, request_id: str, name: str, max_tokens: int = 20) -> Stream:
    """A request with an adapter, or with none."""
    more = {"lora": client.loras[name]} if name else {}
    return await client.add(request_id, PROMPT, max_tokens=max_tokens, **more)


async def check(client: TokenClient, stream: Stream, path: str, max_tokens: int = 20) -> None:
    virtual = virtual_ids(SOFT_TOKENS if "soft" in path else 0)
    assert await client.result(stream) == oracle([*virtual, *PROMPT], max_tokens, lora_path=path), stream.request_id


async def refused(call: Awaitable[object]) -> BlockyardError:
    with pytest.raises(Exception) as caught:
        await call
    return from_rpc_error(caught.value)


async def load(harness: Harness, client: TokenClient, *names: str) -> Operator:
    operator = await harness.operator()
    for name in names:
        await operator.load_lora(name, f"/adapters/{name}")
    await client.wait_until(lambda: set(names) <= client.loras.keys())
    return operator


async def test_requests_have_the_adapters_that_they_name(harness: Harness, settings: Settings) -> None:
    """More adapters than slots, and none, side by side: each as it is alone, and no KV of another.

    One of them is a soft prompt, of which the worker gets the virtual tokens.
    """
    worker = await harness.worker(step_seconds=0.001)
    server = await harness.scheduler(settings(max_loras=2, lora_patience_seconds=0.05))
    client = await harness.client()
    await load(harness, client, "a", "b", "soft")
    for turn in range(3):
        streams = {name: await add(client, f"{name}-{turn}", name) for name in ("a", "", "b", "soft")}
        for name, stream in streams.items():
            await check(client, stream, f"/adapters/{name}" if name else "")
            assert stream.num_cached_tokens == (32 if turn else 0)
    await until_idle(server)
    assert worker.refusals == []


async def test_one_that_is_loaded_in_place_has_another_number_and_other_kv(
    harness: Harness, settings: Settings
) -> None:
    """Requests that run go on with the one that they began with, which the worker forgets after them."""
    worker = await harness.worker(step_seconds=0.005)
    await harness.scheduler(settings(max_loras=2))
    client = await harness.client()
    operator = await load(harness, client, "a")
    before = client.loras["a"].lora_id
    running = await add(client, "old", "a", 200)
    await client.wait_until(lambda: running.token_ids[0])
    assert (await operator.load_lora("a", "/adapters/a")).lora_id == before, "the same again"
    error = await refused(operator.load_lora("a", "/adapters/new"))
    assert error.reason is Reason.WRONG_STATE
    assert "in place" in error.message
    status = await operator.load_lora("a", "/adapters/new", load_inplace=True)
    assert (status.digest, list(status.loaded_replica_ids)) == (digest_of("/adapters/new"), [0])
    await client.wait_until(lambda: client.loras["a"].lora_id == status.lora_id != before)
    new = await add(client, "new", "a")
    await check(client, new, "/adapters/new")
    assert new.num_cached_tokens == 0
    assert before in worker.adapters
    await check(client, running, "/adapters/a", 200)
    await until(lambda: list(worker.adapters) == [status.lora_id])


async def test_one_that_is_unloaded_is_not_listed_and_serves_who_has_it(harness: Harness, settings: Settings) -> None:
    worker = await harness.worker(step_seconds=0.005)
    await harness.scheduler(settings(max_loras=1))
    client = await harness.client()
    operator = await load(harness, client, "a", "b")
    running = await add(client, "r", "a", 100)
    await client.wait_until(lambda: running.token_ids[0])
    unload = operator.stub.UnloadLora
    for _ in range(2):
        await unload(admin_pb2.UnloadLoraRequest(name="a"))
    await client.wait_until(lambda: set(client.loras) == {"b"})
    await check(client, running, "/adapters/a", 100)
    await until(lambda: [adapter.name for adapter in worker.adapters.values()] == ["b"])
    await operator.stub.PinLora(admin_pb2.PinLoraRequest(name="b", pinned=True))
    assert (await refused(unload(admin_pb2.UnloadLoraRequest(name="b")))).reason is Reason.WRONG_STATE
    assert (await operator.loras())[0].pinned
    unknown = operator.stub.PinLora(admin_pb2.PinLoraRequest(name="c", pinned=True))
    assert (await refused(unknown)).reason is Reason.MODEL_NOT_FOUND


async def test_more_adapters_than_a_cache_holds_take_turns(harness: Harness, settings: Settings) -> None:
    worker = await harness.worker()
    server = await harness.scheduler(settings(max_loras=1, max_cpu_loras=2, lora_patience_seconds=0.01))
    client = await harness.client()
    await load(harness, client, "a", "b", "c", "d")
    for turn in range(2):
        for name in ("a", "b", "c", "d"):
            await check(client, await add(client, f"{name}-{turn}", name), f"/adapters/{name}")
            assert len(worker.adapters) <= 2
    await until_idle(server)
    assert worker.refusals == []
    assert Scrape.of(server.service.metrics.registry).sum("blockyard_lora_evictions_total") >= 6


async def test_requests_go_where_their_adapter_is_in_a_slot(harness: Harness, settings: Settings) -> None:
    """Two replicas with a slot each: one adapter has the first and one the second, whatever is asked in what order."""
    workers = [await harness.worker(name) for name in ("", "-2")]
    address = harness.configuration.service.worker_address
    server = await harness.scheduler(settings(worker_address=f"{address}, {address}-2", max_loras=1))
    client = await harness.client()
    await until(lambda: len(server.service.dispatcher.ready_engines) == 2)
    operator = await load(harness, client, "a", "b")
    for number, name in enumerate("abbabaab"):
        # Each by itself: every slot is free.
        await check(client, await add(client, f"r{number}", name), f"/adapters/{name}")
        await until_idle(server)
    assert [list(lora.resident_replica_ids) for lora in await operator.loras()] == [[0], [1]]
    assert [stats.num_completion_tokens_total for stats in server.service.stats()] == [80, 80]
    assert [worker.refusals for worker in workers] == [[], []]


async def test_what_a_worker_says_of_an_adapter_reaches_the_operator(harness: Harness, settings: Settings) -> None:
    worker = await harness.worker()
    await harness.scheduler(settings(max_loras=1, lora_root="/adapters"))
    client = await harness.client()
    operator = await harness.operator()
    error = await refused(operator.load_lora("a", "missing"))
    assert (error.reason, "adapter_config.json" in error.message) == (Reason.MODEL_NOT_LOADED, True)
    for path in ("../secrets", "/etc", "a/../../b", "", "/adapters-too/a"):
        assert (await refused(operator.load_lora("a", path))).reason is Reason.FIELD_INVALID, path
    assert (await refused(operator.load_lora("a b", "a"))).reason is Reason.FIELD_INVALID
    assert worker.num_lora_loads == 0
    assert (await operator.load_lora("a", "sub/../a")).path == "/adapters/a"
    await client.wait_until(lambda: "a" in client.loras)


async def test_without_room_for_adapters_there_are_none(harness: Harness) -> None:
    await harness.worker()
    await harness.scheduler()
    client = await harness.client()
    operator = await harness.operator()
    assert (await refused(operator.load_lora("a", "/adapters/a"))).reason is Reason.FEATURE_DISABLED
    assert await operator.loras() == []
    lora = {"lora_id": 3, "name": "a", "path": "/a", "digest": digest_of("/a")}
    with pytest.raises(BlockyardError) as caught:
        await client.result(await client.add("r", PROMPT, lora=lora))
    assert caught.value.reason is Reason.FEATURE_DISABLED


async def test_a_worker_that_takes_anothers_place_has_the_adapters(harness: Harness, settings: Settings) -> None:
    worker = await harness.worker(step_seconds=0.005)
    await harness.scheduler(settings(max_loras=2, lora_modules="a=/adapters/a,soft=/adapters/soft"))
    client = await harness.client()
    await client.wait_until(lambda: {"a", "soft"} <= client.loras.keys())
    streams = {name: await add(client, name or "base", name, 100) for name in ("a", "soft", "")}
    await client.wait_until(lambda: all(stream.token_ids[0] for stream in streams.values()))
    await worker.kill()
    successor = await harness.worker(step_seconds=0.001)
    for name, stream in streams.items():
        await check(client, stream, f"/adapters/{name}" if name else "", 100)
        assert [recovery.exact for recovery in stream.recovered] == [True]
    assert successor.refusals == []


async def test_a_schedulers_death_loses_no_adapter(harness: Harness, settings: Settings) -> None:
    """Its successor hears of them from a gateway; what runs goes on with the one that it began with."""
    harness.configuration = settings(max_loras=2)
    worker = await harness.worker(step_seconds=0.002)
    async with harness.running_scheduler(), harness.gateway("g") as client:
        await client.wait_until_ready()
        operator = await load(harness, client, "a")
        stream = await add(client, "r", "a", 100)
        await client.wait_until(lambda: stream.token_ids[0])
        await operator.load_lora("a", "/adapters/new", load_inplace=True)
        await client.wait_until(lambda: client.loras["a"].path == "/adapters/new")
        known = dict(client.loras)
    await harness.scheduler()
    again = harness.gateway("g")
    again.loras = known
    async with again as client:
        await client.wait_until_ready()
        await client.wait_until(lambda: client.loras)
        assert client.loras == known
        old = await client.resubmit(stream)
        await check(client, await add(client, "new", "a"), "/adapters/new")
        await check(client, old, "/adapters/a", 100)
    assert worker.num_lora_loads == 2, "the worker kept them"


async def test_what_one_worker_of_a_replica_has_alone_takes_no_place(harness: Harness, settings: Settings) -> None:
    """Also when it is pinned there: the other one lost it, or never had it."""
    workers = [await harness.worker(f"-{number}") for number in range(2)]
    address = "+".join(worker.address for worker in workers)
    sizes = {"tensor_parallel_size": 2, "max_loras": 1, "max_cpu_loras": 1}
    harness.configuration = settings(worker_address=address, **sizes)
    for name in ("a", "b"):
        async with harness.running_scheduler(), harness.gateway(name) as client:
            await client.wait_until_ready()
            await load(harness, client, name)
            assert [[adapter.name for adapter in worker.adapters.values()] for worker in workers] == [[name]] * 2
        workers[0].adapters.clear()
        for adapter in workers[1].adapters.values():
            adapter.pinned = True


async def test_an_adapter_whose_files_have_changed_fails_who_began_with_it(
    harness: Harness, settings: Settings
) -> None:
    """After the death of its worker: nobody goes on with another one."""
    worker = await harness.worker(step_seconds=0.005)
    await harness.scheduler(settings(max_loras=2))
    client = await harness.client()
    await load(harness, client, "a")
    stream = await add(client, "r", "a", 100)
    await client.wait_until(lambda: stream.token_ids[0])
    await worker.kill()
    successor = await harness.worker()
    successor.content["/adapters/a"] = "changed"
    with pytest.raises(BlockyardError) as caught:
        await client.result(stream)
    assert caught.value.reason is Reason.MODEL_NOT_LOADED


async def test_adapters_are_kept_again_after_a_bug(
    harness: Harness, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, num_calls = ReplicaLoras.keep, 0

    async def keep(self: ReplicaLoras) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise ValueError("a bug")
        await whole(self)

    monkeypatch.setattr(ReplicaLoras, "keep", keep)
    await harness.worker()
    await harness.scheduler(settings(max_loras=2, lora_patience_seconds=0.05))
    client = await harness.client()
    await until(lambda: num_calls == 2)
    await load(harness, client, "a")
    await check(client, await add(client, "r", "a"), "/adapters/a")
