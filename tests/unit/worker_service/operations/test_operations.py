"""What operators have a worker do beside its steps, over a real socket."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from safetensors.torch import load_file

from blockyard.contract.diagnostics import DIAGNOSTICS, OPERATIONS
from blockyard.errors import BlockyardError, Reason
from blockyard.worker.v1 import worker_pb2 as pb
from tests.unit.worker_service.driver import WorkerDriver, fails, new_sequence
from worker_service.models.decoder import DecoderModel

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kit.worker_extension import Example


async def call(worker: WorkerDriver, operation: str, **fields: Any) -> Any:
    """Does an operation that every worker has, and returns its result."""
    request = pb.CallExtensionRequest(
        extension="diagnostics", operation=operation, payload=json.dumps(fields).encode() if fields else b""
    )
    return json.loads((await worker.stub.CallExtension(request)).result)


async def extend(worker: WorkerDriver, operation: str, payload: bytes = b"", **fields: Any) -> bytes:
    request = pb.CallExtensionRequest(extension="example", operation=operation, payload=payload, **fields)
    return (await worker.stub.CallExtension(request)).result


def extension_of(worker: WorkerDriver) -> Example:
    return cast("Example", worker.server.operations.extensions["example"])


# Inspection.


async def test_it_describes_the_network(worker: WorkerDriver) -> None:
    lines = (await call(worker, "describe_model"))["text"].splitlines()
    loaded = worker.server.worker.set_up.loaded
    assert loaded is not None
    assert lines[0].startswith(f"LlamaForCausalLM: 2 layers, float32 by {loaded.backend.name}, ")
    head = loaded.model.modules()[-1].weight
    assert not isinstance(head, torch.Tensor)
    assert lines[1] == "  model.embed_tokens: Embedding [384, 64], float32, 96 KiB"
    assert lines[2] == "  layers 0–1:"
    assert lines[3] == "    input_layernorm: RMSNorm [64], float32, 256 bytes"
    assert any(line.startswith("    self_attn.qkv_proj: Linear [128, 64] of q_proj, k_proj, v_proj") for line in lines)
    assert lines[-2:] == [
        "  model.norm: RMSNorm [64], float32, 256 bytes",
        f"  lm_head: Linear [384, 64], {head.layout}, 96 KiB",
    ]


async def test_it_tells_its_groups_of_kv(worker: WorkerDriver) -> None:
    info = await worker.info()
    [group] = info.kv_groups
    assert (list(group.layers), group.kind, group.block_size) == ([0, 1], pb.KV_KIND_FULL, info.cache.block_size)
    assert (group.num_kv_heads, group.head_dim, group.dtype, group.sliding_window) == (2, 16, pb.DTYPE_FLOAT32, 0)
    assert group.page_bytes == info.cache.cache_block_bytes


# What every worker can do.


async def test_norms_are_those_of_the_files(worker: WorkerDriver, model: Path) -> None:
    files = load_file(model / "model.safetensors")
    norms = {each["name"]: each for each in (await call(worker, "weight_norms"))["weights"]}
    assert set(norms) == set(files)
    for name, each in norms.items():
        assert tuple(each["shape"]) == tuple(files[name].shape)
        assert each["norm"] == pytest.approx(float(files[name].double().norm()))
        assert each["largest"] == float(files[name].abs().max())
    name = "model.layers.1.self_attn.k_proj.weight"
    assert (await call(worker, "weight_norms", names=[name]))["weights"] == [norms[name]]


@pytest.mark.parametrize(
    ("operation", "fields", "field", "problem"),
    [
        ("weight_norms", {"names": ["model.layers.9.mlp"]}, "names", "the model has no tensor 'model.layers.9.mlp'"),
        ("weight_norms", {"names": "lm_head"}, "names", "must be a list of texts"),
        ("weight_norms", {"name": []}, "payload", "got an unexpected keyword argument 'name'"),
        ("measure_bandwidth", {"num_bytes": 1 << 40}, "num_bytes", "must be from 1 to 1073741824, not 1099511627776"),
        ("measure_bandwidth", {"num_bytes": "all"}, "num_bytes", "must be a whole number"),
    ],
)
async def test_wrong_fields_are_refused(
    worker: WorkerDriver, operation: str, fields: dict[str, Any], field: str, problem: str
) -> None:
    error = await fails(call(worker, operation, **fields))
    assert (error.reason, error.violations[0].field) == (Reason.FIELD_INVALID, field)
    assert problem in error.violations[0].description


@pytest.mark.parametrize("payload", [b"{", b"[]", b"\xff"])
async def test_a_payload_that_is_no_object_is_refused(worker: WorkerDriver, payload: bytes) -> None:
    request = pb.CallExtensionRequest(extension="diagnostics", operation="memory_summary", payload=payload)
    error = await fails(worker.stub.CallExtension(request))
    assert (error.reason, error.violations[0].field) == (Reason.FIELD_INVALID, "payload")


async def test_numbers_that_are_not_finite_are_found(worker: WorkerDriver) -> None:
    stream = worker.open(1)
    await stream.step(
        new_sequences=[new_sequence(1, list(range(1, 12)), [3, 7])], sequence_ids=[1], num_new_tokens=[11]
    )
    report = await call(worker, "check_numerics")
    assert report == {"num_tensors": 21, "num_blocks": 2, "tensors": [], "device_block_ids": []}
    set_up = worker.server.worker.set_up
    assert set_up.executor is not None
    assert set_up.loaded is not None
    set_up.executor.cache.device_pool[7, 1, 0, 0, 0, 0] = float("nan")
    set_up.executor.cache.device_pool[8] = float("nan")
    norm = set_up.loaded.model.modules()[1]
    assert isinstance(norm.weight, torch.Tensor)
    kept = norm.weight.clone()
    norm.weight[:3] = torch.tensor([float("inf"), float("nan"), float("-inf")])
    report = await call(worker, "check_numerics")
    name = "model.layers.0.input_layernorm.weight"
    assert report["tensors"] == [{"name": name, "num_nans": 1, "num_infinities": 2}]
    # Block 8 is nobody's.
    assert report["device_block_ids"] == [7]
    [norms] = (await call(worker, "weight_norms", names=[name]))["weights"]
    assert (norms["norm"], norms["largest"]) == ("NaN", "NaN")
    norm.weight.copy_(kept)


async def test_states_are_looked_at_as_float32(
    fresh_worker: WorkerDriver, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of one may look like a NaN in the dtype of the model."""
    monkeypatch.setattr(DecoderModel, "count_state_blocks", lambda self, block_bytes: 2)
    await fresh_worker.prepare(model, pb.DTYPE_BFLOAT16, num_state_blocks=2)
    new = new_sequence(1, [1, 2, 3], [3], fixed_block_ids=[7, 8])
    await fresh_worker.open(1).step(new_sequences=[new], sequence_ids=[1], num_new_tokens=[3])
    executor = fresh_worker.server.worker.set_up.executor
    assert executor is not None
    states = executor.cache.device_pool.flatten(1).view(torch.int32)
    states[8] = 0x3F807FC0
    assert executor.cache.device_pool[8].isnan().any()
    report = await call(fresh_worker, "check_numerics")
    assert (report["num_blocks"], report["device_block_ids"]) == (3, [])
    states[8, 5] = 0x7FC00000
    assert (await call(fresh_worker, "check_numerics"))["device_block_ids"] == [8]


async def test_memory_is_measured(worker: WorkerDriver) -> None:
    [way] = (await call(worker, "measure_bandwidth", num_bytes=1 << 20))["ways"]
    assert (way["name"], way["bytes_per_second"] > 1e6) == ("copy", True)
    summary, info = await call(worker, "memory_summary"), await worker.info()
    assert summary["weights_bytes"] == info.model.parameter_bytes
    assert summary["device_blocks_bytes"] == info.cache.num_device_blocks * info.cache.cache_block_bytes
    assert summary["host_blocks_bytes"] == info.cache.num_host_blocks * info.cache.cache_block_bytes
    assert summary["device_total_bytes"] > summary["process_bytes"] > 0
    assert (await call(worker, "collect_garbage"))["num_objects"] >= 0
    report = await call(worker, "describe_group")
    assert (report["tensor_parallel_size"], report["first_layer"], report["num_layers"]) == (1, 0, 2)


async def test_what_reads_no_weights_needs_no_model(fresh_worker: WorkerDriver) -> None:
    error = await fails(call(fresh_worker, "memory_summary"))
    assert error.reason is Reason.WRONG_STATE
    await fresh_worker.stub.InitDevice(pb.InitDeviceRequest(device_type=pb.DEVICE_TYPE_CPU))
    assert (await call(fresh_worker, "memory_summary"))["weights_bytes"] == 0
    assert (await fails(call(fresh_worker, "check_numerics"))).reason is Reason.WRONG_STATE


async def test_every_worker_has_the_operations_that_clients_know(fresh_worker: WorkerDriver) -> None:
    assert set(fresh_worker.server.operations.extensions[DIAGNOSTICS].operations) == set(OPERATIONS)


# Extensions.


async def test_an_extension_sees_the_weights(worker: WorkerDriver, model: Path) -> None:
    assert await extend(worker, "echo", b"\x00\xff") == b"\x00\xff"
    prefix = "model.layers.1.self_attn"
    files = load_file(model / "model.safetensors")
    counted = await extend(worker, "count", prefix.encode())
    for name, tensor in files.items():
        told = f'"{name}": {tensor.numel()}'.encode()
        assert (told in counted) == name.startswith(prefix)


async def test_what_an_extension_writes_changes_nothing(worker: WorkerDriver) -> None:
    before = await call(worker, "weight_norms")
    assert await extend(worker, "write") == b"in the same thread"
    assert await call(worker, "weight_norms") == before


async def test_what_there_is_not_is_refused_with_what_there_is(worker: WorkerDriver) -> None:
    error = await fails(extend(worker, "other"))
    assert (error.reason, error.violations[0].field) == (Reason.FIELD_INVALID, "operation")
    assert "answer_text, count, echo" in error.violations[0].description
    error = await fails(worker.stub.CallExtension(pb.CallExtensionRequest(extension="other", operation="echo")))
    assert "the extensions are: diagnostics, example" in error.violations[0].description


async def test_an_error_of_an_extension_is_told_as_one(worker: WorkerDriver) -> None:
    error = await fails(extend(worker, "fail"))
    assert (error.reason, error.message) == (Reason.EXTENSION_FAILED, "example.fail raised ValueError: as it was told")
    error = await fails(extend(worker, "answer_text", b"x"))
    assert "returned str, not bytes" in error.message
    assert await extend(worker, "echo", b"as before") == b"as before"


async def test_no_step_runs_meanwhile_and_no_call_during_a_step(worker: WorkerDriver) -> None:
    stream, extension = worker.open(1), extension_of(worker)
    await stream.step()
    calling = asyncio.create_task(extend(worker, "wait"))
    assert await asyncio.to_thread(extension.has_begun.wait, 20)
    await stream.send(new_sequences=[new_sequence(1, [5, 6], [1])], sequence_ids=[1], num_new_tokens=[2])
    answer = asyncio.create_task(stream.answer())
    # A call that the loop answers by itself comes and goes, and the step waits.
    await worker.info()
    assert not answer.done()
    extension.may_end.set()
    assert await calling == b"done"
    assert (await answer).step_id == 2


async def test_steps_go_on_between_the_pieces_of_an_operation(worker: WorkerDriver) -> None:
    stream, extension = worker.open(1), extension_of(worker)
    await stream.step()
    calling = asyncio.create_task(extend(worker, "wait_in_pieces"))
    assert await asyncio.to_thread(extension.has_begun.wait, 20)
    assert (await stream.step()).step_id == 2
    assert not calling.done()
    extension.may_end.set()
    assert await calling == b"done"


async def test_what_takes_too_long_is_told_and_what_has_not_begun_is_given_up(worker: WorkerDriver) -> None:
    extension, timeout = extension_of(worker), {"nanos": 50_000_000}
    calls = [fails(extend(worker, "wait", timeout=timeout)) for _ in range(2)]
    errors: list[BlockyardError] = await asyncio.gather(*calls)
    assert [error.reason for error in errors] == [Reason.OPERATION_DEADLINE] * 2
    extension.may_end.set()
    assert await extend(worker, "echo", b"after") == b"after"
    assert extension.num_calls == 1
    error = await fails(extend(worker, "echo", timeout={"seconds": 3600}))
    assert (error.reason, error.violations[0].field) == (Reason.FIELD_INVALID, "timeout")
