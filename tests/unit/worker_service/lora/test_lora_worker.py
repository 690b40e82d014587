"""A worker with adapters, over its socket: read beside steps, activated by steps, refused where they must be."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from blockyard.errors import BlockyardError, Reason
from blockyard.lora.virtual_tokens import virtual_ids
from blockyard.worker.v1 import worker_pb2 as pb
from tests.kit.kernels.step_runner import StepRunner
from tests.kit.kernels.tiny_adapters import HeldAdapter, make_tiny_adapter, make_tiny_prompt
from tests.kit.processes.scrape import Scrape
from tests.unit.worker_service.driver import StepDriver, WorkerDriver, fails, new_sequence, running_worker, sampling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PROMPT = list(range(5, 25))
SOFT = 4
LIMITS = pb.LoraLimits(max_loras=2, max_lora_rank=8, max_cpu_loras=3, max_prompt_adapter_tokens=5)


@pytest.fixture
async def adapted(socket_folder: Path, model: Path, tmp_path: Path) -> AsyncIterator[WorkerDriver]:
    """A worker with room for two adapters in steps and three in its cache, of five that there are."""
    make_tiny_prompt(tmp_path / "loras" / "soft", model, 9, num_tokens=SOFT)
    for index, name in enumerate(("a", "b", "c", "d")):
        make_tiny_adapter(tmp_path / "loras" / name, model, index, rank=4 + index)
    async with started(socket_folder, model, worker_lora_root=str(tmp_path / "loras")) as driver:
        yield driver


@asynccontextmanager
async def started(
    folder: Path, model: Path, limits: pb.LoraLimits = LIMITS, **settings: Any
) -> AsyncIterator[WorkerDriver]:
    async with running_worker(folder, **settings) as driver:
        await driver.stub.InitDevice(pb.InitDeviceRequest(device_type=pb.DEVICE_TYPE_CPU, dtype=pb.DTYPE_FLOAT32))
        request = pb.LoadModelRequest(model=str(model), lora=limits)
        async for _ in driver.stub.LoadModel(request):
            pass
        await driver.initialize_cache()
        yield driver


async def add(worker: WorkerDriver, lora_id: int, path: str = "", **fields: Any) -> pb.LoraAdapter:
    name = "abcd"[lora_id - 1]
    request = pb.AddLoraRequest(**{"lora_id": lora_id, "name": name, "path": path or name} | fields)
    return (await worker.stub.AddLora(request)).adapter


async def generate(steps: StepDriver, sequence_id: int, lora_id: int, num_tokens: int = 6) -> list[int]:
    """Runs one prompt with an adapter that is in a slot, and forgets it."""
    new = new_sequence(sequence_id, PROMPT, [60, 61, 62, 63], lora_id=lora_id)
    first = await steps.sampled(new_sequences=[new], sequence_ids=[sequence_id], num_new_tokens=[len(PROMPT)])
    rest = await steps.decode(sequence_id, num_tokens - 1)
    await steps.step(finished_sequence_ids=[sequence_id])
    return [first[sequence_id], *rest]


async def test_adapters_of_one_step_give_the_tokens_of_each_alone(adapted: WorkerDriver) -> None:
    for lora_id in (1, 2):
        await add(adapted, lora_id)
    steps = adapted.open(1)
    await steps.step(activated_lora_slots=[0, 1], activated_lora_ids=[2, 1])
    alone = [await generate(steps, 10 + lora_id, lora_id) for lora_id in range(3)]
    assert len({tuple(tokens) for tokens in alone}) == 3
    new = [
        new_sequence(i, PROMPT, list(range(1 + 4 * i, 5 + 4 * i)), lora_id=lora_id)
        for i, lora_id in enumerate((0, 1, 2, 1))
    ]
    ids = list(range(4))
    found = [
        [token]
        for token in (await steps.sampled(new_sequences=new, sequence_ids=ids, num_new_tokens=[20] * 4)).values()
    ]
    for _ in range(5):
        sampled = await steps.sampled(sequence_ids=ids, num_new_tokens=[1] * 4)
        for i, token in sampled.items():
            found[i].append(token)
    assert found == [alone[lora_id] for lora_id in (0, 1, 2, 1)]


async def test_a_soft_prompt_stands_before_the_prompt(adapted: WorkerDriver) -> None:
    """Mixed with base and LoRA rows, in pieces, and beside what counts and scores the prompt's tokens."""
    await add(adapted, 1)
    told = await add(adapted, 2, "soft")
    assert (told.num_virtual_tokens, told.rank, list(told.targets)) == (SOFT, 0, [])
    assert told.num_bytes == SOFT * 64 * 4
    steps = adapted.open(1)
    await steps.step(activated_lora_slots=[0, 1], activated_lora_ids=[1, 2])
    prompts = {0: PROMPT, 1: PROMPT, 2: [*virtual_ids(SOFT), *PROMPT]}
    asks = sampling(prompt_logprobs=1, repetition_penalty=1.3)
    alone: dict[int, list[int]] = {}
    for lora_id, token_ids in prompts.items():
        new = new_sequence(10 + lora_id, token_ids, [60, 61, 62, 63], lora_id=lora_id, sampling=asks)
        answer = await steps.step(new_sequences=[new], sequence_ids=[10 + lora_id], num_new_tokens=[len(token_ids)])
        (scores,) = answer.prompt_logprobs
        # As for any prompt: of all tokens but the first, and of no virtual ones.
        assert scores.first_position == len(token_ids) - len(PROMPT) + 1
        assert len(scores.logprobs.num_candidates) == len(PROMPT) - 1
        alone[lora_id] = [*answer.token_ids, *await steps.decode(10 + lora_id, 5)]
        await steps.step(finished_sequence_ids=[10 + lora_id])
    assert len(set(map(tuple, alone.values()))) == 3
    new = [
        new_sequence(i, token_ids, list(range(1 + 4 * i, 5 + 4 * i)), lora_id=i, sampling=asks)
        for i, token_ids in prompts.items()
    ]
    pieces = [await steps.step(new_sequences=new, sequence_ids=[0, 1, 2], num_new_tokens=[2] * 3)]
    pieces.append(await steps.step(sequence_ids=[0, 1, 2], num_new_tokens=[18, 18, 4]))
    pieces.append(await steps.step(sequence_ids=[2, 0, 1], num_new_tokens=[18, 1, 1]))
    found = {i: [token for piece in pieces for token in _tokens_of(piece, i)] for i in range(3)}
    assert found == {i: alone[i][: len(found[i])] for i in range(3)}
    scored = [
        len(each.logprobs.num_candidates) for piece in pieces for each in piece.prompt_logprobs if each.sequence_id == 2
    ]
    assert sum(scored) == len(PROMPT) - 1


def _tokens_of(answer: pb.ExecuteModelResponse, sequence_id: int) -> list[int]:
    return [token for each, token in zip(answer.sequence_ids, answer.token_ids, strict=True) if each == sequence_id]


async def test_room_may_be_for_soft_prompts_or_for_lora_alone(socket_folder: Path, model: Path, tmp_path: Path) -> None:
    make_tiny_adapter(tmp_path / "a", model, 1)
    soft = make_tiny_prompt(tmp_path / "soft", model, 9, num_tokens=SOFT)
    limits = pb.LoraLimits(max_loras=1, max_lora_rank=0, max_cpu_loras=1, max_prompt_adapter_tokens=SOFT)
    async with started(socket_folder, model, limits, worker_lora_root=str(tmp_path)) as worker:
        assert "start without --max-lora-rank 0" in (await fails(add(worker, 1))).message
        await add(worker, 1, "soft")
        steps = worker.open(1)
        await steps.step(activated_lora_slots=[0], activated_lora_ids=[1])
        token_ids = [*virtual_ids(SOFT), *PROMPT]
        new = new_sequence(1, token_ids, [60, 61, 62, 63], lora_id=1)
        await steps.sampled(new_sequences=[new], sequence_ids=[1], num_new_tokens=[len(token_ids)])
    with pytest.raises(BlockyardError, match="start with --max-prompt-adapter-tokens"):
        StepRunner.load(model, torch.float32).make_slots([soft])


async def test_a_slot_changes_hands_between_two_steps(adapted: WorkerDriver) -> None:
    for lora_id in (1, 2, 3):
        await add(adapted, lora_id)
    steps = adapted.open(1)
    expected = {}
    for lora_id in (1, 2, 3):
        await steps.step(activated_lora_slots=[0], activated_lora_ids=[lora_id])
        expected[lora_id] = await generate(steps, lora_id, lora_id)
    await steps.step(activated_lora_slots=[0, 1], activated_lora_ids=[2, 3])
    assert await generate(steps, 20, 2) == expected[2]
    assert await generate(steps, 21, 3) == expected[3]
    # The next epoch begins with empty slots.
    steps = adapted.open(2)
    new = new_sequence(1, PROMPT, [1, 2, 3], lora_id=2)
    error = await steps.refused(new_sequences=[new], sequence_ids=[1], num_new_tokens=[20])
    assert "are in no slot" in error.message


async def test_an_adapter_comes_while_a_step_stream_runs(adapted: WorkerDriver) -> None:
    steps = adapted.open(1)
    base = await generate(steps, 1, 0)
    told = await add(adapted, 4)
    assert (told.lora_id, told.name, told.rank) == (4, "d", 7)
    assert list(told.targets) == sorted(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    assert len(told.digest) == 64
    assert told.num_bytes > 0
    assert await add(adapted, 4) == told
    info = (await adapted.info()).lora
    assert info.limits == LIMITS
    assert list(info.adapters) == [told]
    assert (await adapted.stub.ListLoras(pb.ListLorasRequest())).adapters == [told]
    await steps.step(activated_lora_slots=[1], activated_lora_ids=[4])
    assert await generate(steps, 2, 4) != base
    assert await generate(steps, 3, 0) == base
    metrics = Scrape.of(adapted.server.worker.metrics.registry)
    assert [metrics.sum("blockyard_worker_lora_adapters", state=name) for name in ("loaded", "resident")] == [1, 1]
    assert metrics.sum("blockyard_worker_lora_bytes") == told.num_bytes
    assert metrics.sum("blockyard_worker_lora_load_seconds_count") == 1
    await adapted.stub.RemoveLora(pb.RemoveLoraRequest(lora_id=4))
    metrics = Scrape.of(adapted.server.worker.metrics.registry)
    assert metrics.sum("blockyard_worker_lora_adapters") == metrics.sum("blockyard_worker_lora_bytes") == 0
    assert metrics.sum("blockyard_worker_lora_removals_total") == 1


async def test_slots_are_given_up_with_the_weights_and_come_back_empty(adapted: WorkerDriver) -> None:
    """As of a GPU, where slots take memory."""
    loras = adapted.server.worker.set_up.loras
    assert loras is not None
    assert loras.arena is not None
    slot = loras.arena.take(64).fill_(1)
    await adapted.stub.Sleep(pb.SleepRequest(level=1))
    assert not slot.any()
    await adapted.stub.WakeUp(pb.WakeUpRequest())
    await add(adapted, 1)
    steps = adapted.open(1)
    await steps.step(activated_lora_slots=[0], activated_lora_ids=[1])
    assert await generate(steps, 1, 1)


async def test_what_is_in_use_or_pinned_stays(adapted: WorkerDriver) -> None:
    await add(adapted, 1)
    steps = adapted.open(1)
    new = new_sequence(1, PROMPT, [1, 2, 3], lora_id=1)
    await steps.step(
        activated_lora_slots=[0],
        activated_lora_ids=[1],
        new_sequences=[new],
        sequence_ids=[1],
        num_new_tokens=[20],
    )
    remove, pin = adapted.stub.RemoveLora, adapted.stub.PinLora
    error = await fails(remove(pb.RemoveLoraRequest(lora_id=1)))
    assert error.reason is Reason.WRONG_STATE
    assert "sequences of this epoch have adapter 1" in error.message
    await steps.decode(1, 2)
    await steps.step(finished_sequence_ids=[1])
    await pin(pb.PinLoraRequest(lora_id=1, pinned=True))
    assert (await adapted.info()).lora.adapters[0].pinned
    assert "is pinned" in (await fails(remove(pb.RemoveLoraRequest(lora_id=1)))).message
    await pin(pb.PinLoraRequest(lora_id=1))
    await remove(pb.RemoveLoraRequest(lora_id=1))
    await remove(pb.RemoveLoraRequest(lora_id=1))
    assert not (await adapted.info()).lora.adapters
    assert "not in the cache" in (await fails(pin(pb.PinLoraRequest(lora_id=1, pinned=True)))).message
    error = await steps.refused(activated_lora_slots=[0], activated_lora_ids=[1])
    assert "adapters [1] are not in the cache" in error.message


@pytest.mark.parametrize("name", ["a", "soft"])
async def test_an_adapter_that_is_removed_as_it_is_read_takes_no_place(
    adapted: WorkerDriver, tmp_path: Path, name: str
) -> None:
    with HeldAdapter(tmp_path / "loras" / name) as held:
        adding = asyncio.ensure_future(add(adapted, 1, name))
        await held.wait_until_read()
        listed = await adapted.stub.ListLoras(pb.ListLorasRequest())
        assert (list(listed.adapters), list(listed.reading_lora_ids)) == ([], [1])
        await adapted.stub.RemoveLora(pb.RemoveLoraRequest(lora_id=1))
        assert "removed while it was read" in (await fails(adding)).message
        others = [asyncio.ensure_future(add(adapted, lora_id)) for lora_id in (2, 3, 4)]
        held.let_go()
        await asyncio.gather(*others)
    listed = await adapted.stub.ListLoras(pb.ListLorasRequest())
    assert ([each.lora_id for each in listed.adapters], list(listed.reading_lora_ids)) == ([2, 3, 4], [])


async def test_what_cannot_be_read_is_refused(adapted: WorkerDriver, model: Path, tmp_path: Path) -> None:
    (tmp_path / "loras" / "link").symlink_to(make_tiny_adapter(tmp_path / "outside", model, 9))
    for path in ("../outside", "link", str(tmp_path / "outside")):
        assert (await fails(add(adapted, 1, path))).reason is Reason.PERMISSION_DENIED
    assert (await fails(add(adapted, 1, "nowhere"))).reason is Reason.MODEL_NOT_LOADED
    make_tiny_adapter(tmp_path / "loras" / "wide", model, 9, rank=9)
    assert "rank 9, more than" in (await fails(add(adapted, 1, "wide"))).message
    error = await fails(add(adapted, 0, name=""))
    assert [violation.field for violation in error.violations] == ["lora_id", "name"]
    # A number that failed is free still.
    await add(adapted, 1, str(tmp_path / "loras" / "a"))
    assert "is never used again" in (await fails(add(adapted, 1, "b"))).message
    for lora_id in (2, 3):
        await add(adapted, lora_id)
    error = await fails(add(adapted, 4))
    assert error.reason is Reason.WRONG_STATE
    assert "the cache has 3 adapters" in error.message


async def test_a_worker_without_room_or_root_says_so(worker: WorkerDriver) -> None:
    assert not (await worker.info()).HasField("lora")
    for call in (
        add(worker, 1),
        worker.stub.RemoveLora(pb.RemoveLoraRequest(lora_id=1)),
        worker.stub.PinLora(pb.PinLoraRequest(lora_id=1)),
        worker.stub.ListLoras(pb.ListLorasRequest()),
    ):
        assert (await fails(call)).reason is Reason.FEATURE_DISABLED


async def test_limits_that_make_no_sense_are_refused(fresh_worker: WorkerDriver, model: Path) -> None:
    await fresh_worker.stub.InitDevice(pb.InitDeviceRequest(device_type=pb.DEVICE_TYPE_CPU))
    limits = pb.LoraLimits(max_loras=300, max_lora_rank=0, max_cpu_loras=4)
    call = fresh_worker.stub.LoadModel(pb.LoadModelRequest(model=str(model), lora=limits))
    error = await fails(anext(aiter(call)))
    assert [violation.field for violation in error.violations] == [
        "lora.max_loras",
        "lora.max_lora_rank",
        "lora.max_cpu_loras",
    ]
