"""Weights that come as tensors, over a real socket: whole ones are computed with, everything else is refused."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from blockyard.client.weights import read_tensors
from blockyard.common.v1 import administration_pb2, status_pb2
from blockyard.contract.parallel import Parallel
from blockyard.errors import Reason
from blockyard.worker.v1 import worker_pb2 as pb
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.waiting import until
from tests.unit.worker_service.driver import WorkerDriver, fails, running_worker
from tests.unit.worker_service.weights.test_residency import generate, kept_worker, perturb, reload
from worker_service.models.builder import build_decoder
from worker_service.models.loader import load_model
from worker_service.operations.codec import decode_head
from worker_service.weights.update import WeightUpdate, order_heads, tensor_names

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from pathlib import Path

__all__ = ["kept_worker"]
TICKET = b"0123456789abcdef"
NAMES = {"torch.float32": "F32", "torch.bfloat16": "BF16"}
PIECE_BYTES = 1000


class Tensors:
    """The tensors of a folder, as a trainer has them."""

    def __init__(self, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        self.data = [tensor.contiguous().numpy().tobytes() for tensor in tensors.values()]
        self.heads = [
            administration_pb2.TensorHead(
                name=name, dtype=NAMES[str(tensor.dtype)], shape=tensor.shape, sha256=hashlib.sha256(data).digest()
            )
            for (name, tensor), data in zip(tensors.items(), self.data, strict=True)
        ]

    def pieces(self, order: Sequence[int], ticket: bytes = TICKET) -> Iterator[pb.UpdateWeightsRequest]:
        for index in order:
            for begin in range(0, len(self.data[index]), PIECE_BYTES):
                data = self.data[index][begin : begin + PIECE_BYTES]
                yield pb.UpdateWeightsRequest(tensor=index, data=data, ticket=ticket)


async def begin(worker: WorkerDriver, tensors: Tensors, version: str = "2") -> list[int]:
    request = pb.BeginWeightUpdateRequest(version=version, tensors=tensors.heads, ticket=TICKET)
    return list((await worker.stub.BeginWeightUpdate(request)).order)


async def finish(worker: WorkerDriver, version: str = "2") -> pb.ReloadedWeights:
    return (await worker.stub.FinishWeightUpdate(pb.FinishWeightUpdateRequest(version=version))).updated


def state(info: pb.GetWorkerInfoResponse) -> str:
    return status_pb2.WorkerState.Name(info.state).removeprefix("WORKER_STATE_")


@pytest.fixture
def other(model: Path, socket_folder: Path) -> Path:
    """A folder with other weights of the same sizes."""
    return perturb(model, socket_folder / "other")


async def test_tensors_that_came_are_computed_with(kept_worker: WorkerDriver, other: Path) -> None:
    worker, tensors = kept_worker, Tensors(other)
    before = await generate(worker, 1)
    order = await begin(worker, tensors)
    assert state(await worker.info()) == "STALE"
    assert sorted(order) == list(range(len(tensors.heads)))
    waiting = asyncio.ensure_future(finish(worker))
    answer = await worker.send_weights(tensors.pieces(order))
    assert (answer.num_tensors, answer.num_bytes) == (len(order), sum(map(len, tensors.data)))
    updated = await waiting
    assert updated.model.weights_version == "2"
    assert state(await worker.info()) == "CACHE_READY"
    assert await finish(worker) == updated
    after = await generate(worker, 2)
    # As from a folder with the same tensors, to the last bit.
    from_folder = await reload(worker, other, "3")
    assert from_folder.cache.determinism_id == updated.cache.determinism_id
    assert from_folder.model.weights_digest == updated.model.weights_digest
    assert await generate(worker, 3) == after != before


async def test_what_is_not_the_models_is_refused_before_anything_is_written(worker: WorkerDriver, model: Path) -> None:
    before = await generate(worker, 1)
    for change, told in (
        (lambda heads: heads[0].shape.append(3), "has shape"),
        (lambda heads: heads.pop(), "is missing"),
        (lambda heads: heads.append(administration_pb2.TensorHead(name="model.new")), "the model has no model.new"),
        (lambda heads: heads.append(heads[0]), "a name is given twice"),
        (lambda heads: setattr(heads[1], "dtype", "I8"), "is I8"),
        (lambda heads: setattr(heads[1], "sha256", b"x"), "neither SHA-256 nor CRC-32"),
    ):
        tensors = Tensors(model)
        change(tensors.heads)
        error = await fails(begin(worker, tensors))
        assert error.reason is Reason.FIELD_INVALID
        assert any(told in violation.description for violation in error.violations), error
    assert (await fails(begin(worker, Tensors(model), version=""))).reason is Reason.FIELD_INVALID
    assert state(await worker.info()) == "CACHE_READY"
    assert await generate(worker, 2) == before


@pytest.mark.parametrize("broken", ["cut", "order", "bytes", "crc", "more", "gone"])
async def test_a_broken_update_leaves_the_worker_stale_and_a_reload_heals_it(
    worker: WorkerDriver, other: Path, broken: str
) -> None:
    before, tensors = await generate(worker, 1), Tensors(other)
    if broken == "crc":
        for head, data in zip(tensors.heads, tensors.data, strict=True):
            head.sha256, head.crc32 = b"", zlib.crc32(data)
    order = await begin(worker, tensors)
    finishing = asyncio.ensure_future(finish(worker))
    if broken == "cut":
        error = await fails(worker.send_weights(tensors.pieces(order[:5])))
        assert "the stream ended within" in error.message
    elif broken == "order":
        error = await fails(worker.send_weights(tensors.pieces([order[0], order[2]])))
        assert f"received tensor {order[2]} instead of" in error.message
    elif broken == "bytes":
        tensors.data[order[3]] = bytes(len(tensors.data[order[3]]))
        error = await fails(worker.send_weights(tensors.pieces(order[:4])))
        assert "SHA-256" in error.message
    elif broken == "crc":
        tensors.data[order[3]] = bytes(len(tensors.data[order[3]]))
        error = await fails(worker.send_weights(tensors.pieces(order[:4])))
        assert "CRC-32" in error.message
    elif broken == "more":
        tensors.data[order[3]] += bytes(PIECE_BYTES)
        error = await fails(worker.send_weights(tensors.pieces(order[:4])))
        assert "has more than" in error.message
    else:
        call = worker.stub.UpdateWeights()
        await call.write(next(tensors.pieces(order)))
        update = worker.server.worker.residency.update
        await until(lambda: update is not None and update.is_used)
        call.cancel()
    error = await fails(finishing)
    assert (error.reason, "tensors are missing" in error.message) == (Reason.WRONG_STATE, True)
    assert state(await worker.info()) == "STALE"
    assert (await worker.open(2).end_error()).reason is Reason.WRONG_STATE
    await reload(worker)
    assert await generate(worker, 2) == before


async def test_a_ticket_is_good_once(worker: WorkerDriver, other: Path) -> None:
    tensors = Tensors(other)
    order = await begin(worker, tensors)
    error = await fails(worker.send_weights(tensors.pieces(order, b"another one 1234")))
    assert error.reason is Reason.PERMISSION_DENIED
    await worker.send_weights(tensors.pieces(order))
    assert (await fails(worker.send_weights(tensors.pieces(order)))).reason is Reason.PERMISSION_DENIED
    assert (await fails(finish(worker, "3"))).reason is Reason.FIELD_INVALID
    await finish(worker)


async def test_a_stage_takes_its_own_tensors_and_knows_of_the_others(model: Path, other: Path) -> None:
    tensors = read_tensors(other)
    heads = [decode_head(tensor.head()) for tensor in tensors]
    taken: list[set[int]] = []
    for rank in range(2):
        parallel = Parallel(1, 2, rank)
        loaded, whole = (
            load_model(folder, None, torch.device("cpu"), lambda done, total: None, parallel=parallel)
            for folder in (model, other)
        )
        order = order_heads(loaded, heads)
        taken.append(set(order))
        assert set(order_heads(loaded, [replace(head, sample_sha256=b"") for head in heads])) == set(range(len(heads)))
        update = WeightUpdate("2", TICKET, heads, order, tensor_names(loaded))

        async def pieces(order: Sequence[int] = order) -> AsyncIterator[tuple[int, bytes]]:
            for index in order:
                yield index, bytes(tensors[index].data)

        build = functools.partial(build_decoder, loaded.config, loaded.backend, update, parallel)
        await asyncio.gather(update.feed(pieces()), asyncio.to_thread(build))
        assert update.finish() == whole.weights_digest
    assert taken[0] | taken[1] == set(range(len(heads)))
    assert taken[0].isdisjoint(taken[1])


async def test_a_sample_that_is_not_the_tensors_breaks_the_update(worker: WorkerDriver, other: Path) -> None:
    tensors = Tensors(other)
    # The last one that comes, so that nothing else ends the stream.
    tensors.heads[(await begin(worker, tensors))[-1]].sample_sha256 = bytes(32)
    error = await fails(worker.send_weights(tensors.pieces(await begin(worker, tensors))))
    assert "does not match its sample_sha256" in error.message
    assert state(await worker.info()) == "STALE"


async def test_a_tied_table_may_come_twice_if_it_is_the_same(socket_folder: Path) -> None:
    model = tiny_model("llama_tied")
    tensors = Tensors(model)
    index = next(index for index, head in enumerate(tensors.heads) if head.name == "model.embed_tokens.weight")
    head = administration_pb2.TensorHead()
    head.CopyFrom(tensors.heads[index])
    head.name = "lm_head.weight"
    async with running_worker(socket_folder) as worker:
        await worker.prepare(model)
        before = await generate(worker, 1)
        tensors.heads.append(head)
        order = await begin(worker, tensors)
        assert len(order) == len(tensors.heads) - 1
        await worker.send_weights(tensors.pieces(order))
        await finish(worker)
        assert await generate(worker, 2) == before
        head.sha256 = bytes(32)
        tensors.heads[-1] = head
        assert "ties them" in (await fails(begin(worker, tensors))).violations[0].description
