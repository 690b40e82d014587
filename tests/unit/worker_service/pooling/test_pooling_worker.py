"""A worker that pools, over its socket: what it says of itself, what it answers, what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from blockyard.common.v1 import administration_pb2, pooling_pb2
from blockyard.errors import Reason, from_status
from blockyard.worker.v1 import worker_pb2 as pb
from tests.kit.kernels.pooling_models import HIDDEN, pooling_model
from tests.kit.kernels.tiny_models import tiny_model
from tests.unit.worker_service.driver import fails, new_sequence, running_worker

if TYPE_CHECKING:
    from pathlib import Path

LAST = pooling_pb2.Pooling(kind=pooling_pb2.POOLING_KIND_LAST)
NO_YES = pooling_pb2.Pooling(kind=pooling_pb2.POOLING_KIND_LABEL_LOGITS, label_token_ids=[5, 7])


def vectors(answer: pb.ExecuteModelResponse) -> dict[int, Any]:
    """The numbers of each sequence."""
    ends = np.cumsum(answer.pooled_sizes)
    values = np.split(np.frombuffer(answer.pooled_values, "<f4"), ends)[:-1]
    return dict(zip(answer.pooled_sequence_ids, values, strict=True))


async def test_a_worker_pools_over_its_socket(tmp_path: Path) -> None:
    async with running_worker(tmp_path, cpu_kernels="reference") as worker:
        loaded = (await worker.load(pooling_model("qwen3_embedding")))[-1].loaded
        assert (loaded.task, loaded.whole_prompts) == (pooling_pb2.TASK_EMBED, False)
        await worker.initialize_cache()
        steps = worker.open(1)
        ids = list(range(3, 20))
        wanted = pooling_pb2.Pooling(kind=LAST.kind, dimensions=16, normalise=True)
        new = [new_sequence(1, ids, [1, 2, 3], pooling=LAST), new_sequence(2, ids, [4, 5, 6], pooling=wanted)]
        answer = await steps.step(new_sequences=new, sequence_ids=[1, 2], num_new_tokens=[17, 17])
        assert not answer.sequence_ids
        found = vectors(answer)
        assert list(map(len, found.values())) == [HIDDEN, 16]
        cut = found[1][:16]
        np.testing.assert_allclose(found[2], cut / np.linalg.norm(cut), atol=1e-6)
        rows = pooling_pb2.Pooling(kind=pooling_pb2.POOLING_KIND_TOKENS)
        new = [new_sequence(3, ids, [1, 2, 3], pooling=rows)]
        assert vectors(await steps.step(new_sequences=new, sequence_ids=[3], num_new_tokens=[10])) == {}
        answer = await steps.step(sequence_ids=[3], num_new_tokens=[7], finished_sequence_ids=[1, 2])
        assert np.array_equal(vectors(answer)[3].reshape(17, HIDDEN)[-1], found[1])


@pytest.mark.parametrize(
    ("sequence", "words"),
    [
        ({}, "must be set"),
        ({"pooling": NO_YES}, "makes first, last"),
        ({"pooling": pooling_pb2.Pooling(kind=LAST.kind, dimensions=HIDDEN + 1)}, "dimensions"),
        ({"pooling": pooling_pb2.Pooling()}, "pooling.kind"),
        ({"pooling": LAST, "prompt_length": 2}, "has output"),
        ({"pooling": pooling_pb2.Pooling(kind=pooling_pb2.POOLING_KIND_MEAN), "num_computed_tokens": 1}, "all rows"),
    ],
)
async def test_what_cannot_be_pooled_is_refused(tmp_path: Path, sequence: dict[str, Any], words: str) -> None:
    async with running_worker(tmp_path, cpu_kernels="reference") as worker:
        await worker.prepare(pooling_model("qwen3_embedding"))
        new = [new_sequence(1, [3, 4, 5], [1], **sequence)]
        new.append(new_sequence(2, [3, 4, 5], [2], pooling=LAST))
        answer = await worker.open(1).step(new_sequences=new, sequence_ids=[1, 2], num_new_tokens=[1, 3])
        [failure] = answer.failures
        error = from_status(failure.status)
        assert (failure.sequence_id, error.reason) == (1, Reason.FIELD_INVALID)
        assert words in str(error.violations)
        assert list(answer.pooled_sequence_ids) == [2]


async def test_what_a_model_that_pools_does_not_do_is_refused_by_name(tmp_path: Path) -> None:
    async with running_worker(tmp_path, cpu_kernels="reference") as worker:
        device = pb.InitDeviceRequest(device_type=pb.DEVICE_TYPE_CPU, dtype=pb.DTYPE_FLOAT32, configuration_digest="x")
        await worker.stub.InitDevice(device)
        limits = pb.LoraLimits(max_loras=1, max_lora_rank=8, max_cpu_loras=1)
        model = str(pooling_model("qwen3_embedding"))

        async def load(**fields: Any) -> None:
            async for _ in worker.stub.LoadModel(pb.LoadModelRequest(model=model, **fields)):
                pass

        error = await fails(load(lora=limits))
        assert (error.reason, "takes no adapters" in error.message) == (Reason.MODEL_NOT_LOADED, True)
        await load()

        async def save() -> None:
            async for _ in worker.stub.SaveState(
                pb.SaveStateRequest(folder="saved", format=administration_pb2.STATE_FORMAT_SHARDED)
            ):
                pass

        assert "pooling model cannot be saved" in (await fails(save())).message


async def test_a_task_that_the_files_do_not_allow_is_refused_and_a_generating_model_pools_nothing(
    tmp_path: Path,
) -> None:
    async with running_worker(tmp_path, cpu_kernels="reference") as worker:
        device = pb.InitDeviceRequest(device_type=pb.DEVICE_TYPE_CPU, dtype=pb.DTYPE_FLOAT32, configuration_digest="x")
        await worker.stub.InitDevice(device)
        wrong = pb.LoadModelRequest(model=str(tiny_model("llama")), task=pooling_pb2.TASK_EMBED)

        async def load(request: pb.LoadModelRequest) -> pb.LoadedModel:
            return [event async for event in worker.stub.LoadModel(request)][-1].loaded

        error = await fails(load(wrong))
        assert (error.reason, "not guessed" in error.message) == (Reason.MODEL_NOT_LOADED, True)
        loaded = await load(pb.LoadModelRequest(model=str(tiny_model("llama"))))
        assert loaded.task == pooling_pb2.TASK_GENERATE
        await worker.initialize_cache()
        new = [new_sequence(1, [3, 4, 5], [1], pooling=LAST)]
        error = await worker.open(1).failed(new_sequences=new, sequence_ids=[1], num_new_tokens=[3])
        assert "generate" in str(error.violations)
