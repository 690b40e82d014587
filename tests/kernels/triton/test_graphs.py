"""Steps as graphs: what a replay reads, where a step is padded, and which steps are captured."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from blockyard_kernels import planning
from blockyard_kernels.capture import CaptureSizes, StepInputs
from blockyard_kernels.lora import LoraRows
from tests.kit.kernels.strict_graphs import StrictRecording
from tests.kit.kernels.triton_interpreter import DEVICE, IS_INTERPRETED

from blockyard_kernels.cuda import graphs  # isort: skip
from blockyard_kernels.cuda.linear import CudaLinear  # isort: skip
from blockyard_kernels.cuda.lora.slots import CudaLoraOps  # isort: skip

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from blockyard_kernels.ops import AttentionBatch

BLOCK_SIZE = 16
SIZES = CaptureSizes(126, 40, BLOCK_SIZE, None, 8 * BLOCK_SIZE)


def tell(token_ids: Tensor, batch: AttentionBatch) -> Tensor:
    """Stands for a network: tells what each row has of its step's inputs."""
    return torch.stack([token_ids, batch.positions, batch.slot_mapping], 1)


def make_captured() -> graphs.CapturedSteps:
    record = StrictRecording if IS_INTERPRETED else graphs.Recording
    return graphs.CapturedSteps(tell, torch.clone, SIZES, DEVICE, record)  # type: ignore[arg-type]


def make_step(seed: int, num_new_tokens: list[int], *, num_chosen: int | None = None) -> StepInputs:
    """A step of sequences of random lengths, with blocks of their own, of which rows are chosen in any order."""
    chooser = random.Random(seed)
    lens = [count + chooser.randrange(8 * BLOCK_SIZE - count + 1) for count in num_new_tokens]
    width = -(-max(lens) // BLOCK_SIZE)
    blocks = list(range(1, 1 + width * len(lens)))
    chooser.shuffle(blocks)
    num_tokens = sum(num_new_tokens)
    rows = [chooser.randrange(num_tokens) for _ in range(len(lens) if num_chosen is None else num_chosen)]
    return StepInputs(
        np.array(num_new_tokens),
        np.array(lens),
        np.array(blocks, np.int32).reshape(len(lens), width),
        np.array([chooser.randrange(1000) for _ in range(num_tokens)]),
        np.array(rows, np.int64),
    )


def expected(step: StepInputs) -> Tensor:
    """What the rows of a step have that is planned on the host."""
    batch = planning.plan(step.num_new_tokens, step.seq_lens, step.block_tables, BLOCK_SIZE, None, torch.device("cpu"))
    return tell(torch.as_tensor(step.token_ids).cpu(), batch)[step.chosen]


def test_a_replay_multiplies_by_the_adapters_that_its_rows_have():
    """Steps of one size with and without adapters, in turn: neither leaves the other anything."""
    sizes = replace(SIZES, num_lora_slots=3)
    record = StrictRecording if IS_INTERPRETED else graphs.Recording
    weight = CudaLinear(torch.eye(16, device=DEVICE), None)
    ops = CudaLoraOps(DEVICE)
    ops.make_room(weight, 3, 16)
    for slot in range(2):
        ops.write(weight, slot, ops.pack(weight, torch.eye(16), (slot + 1.0) * torch.eye(16)))

    def forward(token_ids: Tensor, batch: AttentionBatch) -> Tensor:
        hidden = token_ids.float()[:, None].expand(-1, 16).contiguous()
        if batch.lora is not None:
            room = ops.find(weight)
            assert room is not None
            room.expand(hidden, room.shrink(hidden, batch.lora), batch.lora, hidden)
        return hidden

    captured = graphs.CapturedSteps(forward, torch.clone, sizes, DEVICE, record)  # type: ignore[arg-type]
    for seed, (new, slots) in enumerate(
        [([1] * 3, [1, -1, 0]), ([1] * 3, None), ([1] * 3, [0, 0, 2]), ([5, 1, 20], [1] * 20 + [-1, *[0] * 5])]
    ):
        step = replace(make_step(seed, new), lora=None if slots is None else LoraRows(np.array(slots, np.int32)))
        assert captured.takes(step)
        outputs = captured.replay(step, with_logits=True)
        assert outputs.logits is not None
        factors = np.array([{0: 2, 1: 3}.get(slot, 1) for slot in slots or [-1] * sum(new)])
        assert outputs.logits[:, 0].tolist() == (step.token_ids * factors)[step.chosen].tolist()
    found = {(bucket.num_tokens, bucket.has_loras) for bucket in captured._captured}
    assert found == {(4, True), (4, False), (64, True)}
    assert len(captured._buckets.first()) == 2 * len(graphs.Buckets(SIZES).first())


MIXES = [[1] * 3, [1], [1] * 40, [5, 1, 0, 1], [64], [1] * 39 + [20], [70, 1, 50], [2, 2]]


def test_a_replay_reads_what_is_sent_for_it_alone():
    captured = make_captured()
    for turn in range(2):
        for seed, new in enumerate(MIXES):
            step = make_step(10 * turn + seed, new)
            assert captured.takes(step)
            outputs = captured.replay(step, with_logits=True)
            assert outputs.logits is not None
            assert torch.equal(outputs.logits.cpu(), expected(step)), new
    sizes = {(bucket.num_seqs, bucket.num_tokens) for bucket in captured._captured}
    assert sizes == {(4, 4), (1, 1), (40, 40), (8, 64), (128, 64), (8, 128)}


def test_ids_that_only_the_device_knows_take_their_places():
    captured = make_captured()
    # The table is another one after it has grown.
    for num_rows, new in ((4, [1] * 3), (9, [1] * 3), (6, [5, 1])):
        step = make_step(3, new)
        rows = [num_rows - 1, 1]
        known = step.token_ids.copy()
        table = torch.full((num_rows,), -7, dtype=torch.int64, device=DEVICE)
        table[rows] = torch.from_numpy(known[1:3]).to(DEVICE)
        step.token_ids[1:3] = -1 - np.array(rows)
        outputs = captured.replay(replace(step, last_tokens=table), with_logits=True)
        assert outputs.logits is not None
        assert torch.equal(outputs.logits.cpu(), expected(replace(step, token_ids=known)))


def test_padding_writes_where_nobody_reads_and_clears_nothing():
    seen: list[Tensor] = []

    def look(token_ids: Tensor, batch: AttentionBatch) -> Tensor:
        seen.append(torch.stack([token_ids, batch.positions, batch.slot_mapping], 1))
        return seen[-1]

    record = StrictRecording if IS_INTERPRETED else graphs.Recording
    captured = graphs.CapturedSteps(look, torch.clone, SIZES, DEVICE, record)  # type: ignore[arg-type]
    for new in ([1] * 5, [40, 1]):
        captured.replay(make_step(0, new), with_logits=True)
        padding = seen[-1][sum(new) :].cpu()
        assert len(padding) in (3, 23)
        assert (padding == torch.tensor([0, 0, BLOCK_SIZE - 1])).all()


@pytest.mark.parametrize(
    ("new", "num_chosen", "is_taken"),
    [
        ([1] * 40, 40, True),
        ([1] * 41, 0, False),
        ([1] * 8, 41, False),
        ([126], 0, True),
        ([100, 27], 0, False),
        ([0, 0], 0, False),
        ([2] + [1] * 60, 61, True),
        ([2], 200, False),
    ],
)
def test_a_step_is_taken_that_fits(new: list[int], num_chosen: int, is_taken: bool):
    assert make_captured().takes(make_step(0, new, num_chosen=num_chosen)) == is_taken


def test_a_table_that_is_too_wide_is_not_taken():
    step = make_step(0, [1])
    wide = np.zeros((1, 9), np.int32)
    inputs = StepInputs(step.num_new_tokens, step.seq_lens, wide, step.token_ids, step.chosen)
    assert not make_captured().takes(inputs)


def test_graphs_of_mixes_are_so_many_at_most(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graphs, "MAX_MIXES", 1)
    captured = make_captured()
    captured.replay(make_step(0, [3, 2]), with_logits=True)
    assert captured.takes(make_step(1, [1, 7, 4]))
    assert not captured.takes(make_step(1, [70, 1]))
    assert captured.takes(make_step(1, [1, 1]))


def test_the_start_captures_the_largest_first_for_so_long(monkeypatch: pytest.MonkeyPatch):
    captured = make_captured()
    captured.capture_ahead(seconds=-1.0)
    assert not captured._captured
    monkeypatch.setattr(graphs, "MIXED_SEQUENCES", (8, 64))
    captured = make_captured()
    captured.capture_ahead(seconds=60.0)
    sizes = [(bucket.num_tokens, bucket.num_seqs) for bucket in captured._captured]
    assert sizes[:4] == [(128, 64), (128, 8), (40, 40), (32, 32)]
    assert sizes[-1] == (1, 1)


def test_what_all_graphs_take_is_told_from_the_two_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device on which the first takes 1000 more, and the driver, of which torch knows nothing, 7 for each."""
    sizes = CaptureSizes(126, 5, BLOCK_SIZE, None, 8 * BLOCK_SIZE)
    recorded: list[int] = []

    def record(work: Callable[[], Tensor], pool: Any) -> graphs.Recording:
        recording = graphs.Recording(work, pool) if not IS_INTERPRETED else StrictRecording(work, pool)
        num_seqs = len(recording.output)
        words = (128 if num_seqs == 8 else num_seqs) + num_seqs * (3 + 8)
        recorded.append(4 * words + recording.output.nbytes)
        return recording  # type: ignore[return-value]

    def taken_bytes(_: torch.device) -> tuple[int, int]:
        by_torch = sum(recorded) + 1000 * bool(recorded)
        return by_torch, by_torch + 7 * len(recorded)

    monkeypatch.setattr(graphs, "taken_bytes", taken_bytes)
    estimated, everything = (graphs.CapturedSteps(tell, torch.clone, sizes, DEVICE, record) for _ in range(2))
    estimated.estimate()
    assert len(recorded) == 2
    recorded.clear()
    everything.capture_ahead(1000)
    assert everything.num_bytes == sum(recorded) + 1000 + 7 * len(recorded)
    num_mixes = sum(size == max(recorded) for size in recorded)
    assert estimated.num_bytes == everything.num_bytes + (graphs.MAX_MIXES - num_mixes) * (max(recorded) + 7)
