"""Fixed blocks over a real socket, of a model that asks for two of each sequence and puts nothing into them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from blockyard.worker.v1 import worker_pb2 as pb
from blockyard_kernels.cpu.plan import CapturedPlan
from tests.unit.worker_service.driver import BLOCK_SIZE, WorkerDriver, fails, new_sequence, pairs
from worker_service.models.decoder import DecoderModel

if TYPE_CHECKING:
    from pathlib import Path

    from blockyard_kernels.capture import StepInputs, StepOutputs

PROMPT = list(range(5, 25))
PROFILE = {
    "block_size": BLOCK_SIZE,
    "device_memory_utilization": 0.5,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
}


@pytest.fixture(autouse=True)
def has_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecoderModel, "count_state_blocks", lambda self, block_bytes: 2)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The fixed tables of each step that the kernels compute, as they get them."""
    found: list[Any] = []
    replay = CapturedPlan.replay

    def record(self: CapturedPlan, step: StepInputs, *, with_logits: bool) -> StepOutputs:
        found.append(None if step.fixed_tables is None else step.fixed_tables.tolist())
        return replay(self, step, with_logits=with_logits)

    monkeypatch.setattr(CapturedPlan, "replay", record)
    return found


async def test_the_model_says_how_many_and_the_scheduler_tells_all(fresh_worker: WorkerDriver, model: Path) -> None:
    await fresh_worker.load(model)
    available = await fresh_worker.stub.DetermineNumAvailableBlocks(pb.DetermineNumAvailableBlocksRequest(**PROFILE))
    assert available.num_state_blocks == 2
    cache = await fresh_worker.initialize_cache(num_state_blocks=3)
    assert cache.num_state_blocks == (await fresh_worker.info()).cache.num_state_blocks == 3


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"num_state_blocks": 1}, "num_state_blocks"),
        ({"num_state_blocks": 2, "max_draft_tokens": 2, "max_draft_rows": 4}, "max_draft_tokens"),
        ({"num_state_blocks": 2, "num_device_blocks": 34}, "max_model_len"),
        ({"num_state_blocks": 2**32 - 1}, "max_model_len"),
    ],
)
async def test_what_cannot_be_is_refused(
    fresh_worker: WorkerDriver, model: Path, wrong: dict[str, int], field: str
) -> None:
    await fresh_worker.load(model)
    refusal = await fails(fresh_worker.initialize_cache(**wrong))
    assert field in [violation.field for violation in refusal.violations]


async def test_each_step_gets_the_fixed_blocks_of_its_rows(
    fresh_worker: WorkerDriver, model: Path, computed: list[Any]
) -> None:
    await fresh_worker.prepare(model, num_state_blocks=2)
    # The warm-up computes in the scratch block.
    assert {tuple(map(tuple, tables)) for tables in computed} <= {((0, 0),) * count for count in range(1, 17)}
    computed.clear()
    stream = fresh_worker.open(1)
    new = new_sequence(1, PROMPT, [1, 2, 3], fixed_block_ids=[11, 12])
    fork = pb.Fork(
        parent_sequence_id=1, child_sequence_id=2, sequence_index=1, block_ids=[1, 2, 3], fixed_block_ids=[13, 14]
    )
    await stream.step(new_sequences=[new], sequence_ids=[1], num_new_tokens=[19])
    await stream.step(forks=[fork], sequence_ids=[1, 2], num_new_tokens=[1, 0])
    own = [pb.BlockTable(sequence_id=2, block_ids=[1, 2, 4])]
    copies = pairs((3, 4), (11, 13), (12, 14))
    both = {"sequence_ids": [2, 1], "num_new_tokens": [1, 1]}
    tokens = await stream.sampled(replaced_tables=own, blocks_to_copy=copies, **both)
    assert tokens[1] == tokens[2]
    await stream.step(
        blocks_to_swap_out=pairs((13, 0), (14, 1)),
        sequence_ids=[1],
        num_new_tokens=[1],
    )
    back = [pb.BlockTable(sequence_id=2, block_ids=[1, 2, 4], fixed_block_ids=[15, 16])]
    await stream.step(blocks_to_swap_in=pairs((0, 15), (1, 16)), replaced_tables=back, **both)
    one, two = [11, 12], [13, 14]
    assert computed == [[one], [one], [two, one], [one], [[15, 16], one]]
    device, host = await fresh_worker.checksums([15, 16], [0, 1])
    assert device == host


async def test_a_step_without_them_is_refused(fresh_worker: WorkerDriver, model: Path) -> None:
    await fresh_worker.prepare(model, num_state_blocks=2)
    stream = fresh_worker.open(1)
    new = new_sequence(1, PROMPT, [1, 2, 3])
    refusal = await stream.refused(new_sequences=[new], sequence_ids=[1], num_new_tokens=[20])
    assert [violation.field for violation in refusal.violations] == ["new_sequences[0].fixed_block_ids"]
