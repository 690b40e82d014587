"""The rules of a step about adapters: what breaks them is refused, and nothing has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from blockyard.lora.virtual_tokens import virtual_ids
from tests.unit.worker_service.steps.test_validation import LIMITS, NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS, ints, new
from worker_service.batch.input_batch import InputBatch
from worker_service.lora.adapter import AdapterWeights, LoraRequest
from worker_service.lora.slots import AdapterSlots
from worker_service.step import ForkedRow, Step
from worker_service.steps.new_sequences import reject_wrong
from worker_service.steps.validation import check_step

if TYPE_CHECKING:
    from collections.abc import Iterable

SOFT = 7
KNOWN = {
    lora_id: AdapterWeights(LoraRequest(lora_id, "", ""), 0, (), "", num_virtual_tokens=2 if lora_id == SOFT else 0)
    for lora_id in (5, 6, SOFT)
}


def behind(virtual: Iterable[int], **fields: Any) -> dict[str, Any]:
    """A step that brings sequence 9, whose prompt has some virtual tokens first."""
    token_ids = ints(*virtual, 1, 2)
    return {"new_sequences": (new(9, len(token_ids), token_ids=token_ids, **fields),)}


def step(**fields: Any) -> Step:
    for name in ("num_new_tokens", "activated_lora_slots", "activated_lora_ids"):
        if name in fields:
            fields[name] = ints(*fields[name])
    return Step(1, 1, **fields)


def activation(**slots: int) -> dict[str, Any]:
    """An adapter for each slot, which are named `s0`, `s1`..."""
    return {"activated_lora_slots": [int(name[1:]) for name in slots], "activated_lora_ids": list(slots.values())}


class Rows:
    """Rows 1 (adapter 5) and 2 (none), in the middle of their prompts, and two slots, of which the first has 5."""

    def __init__(self) -> None:
        self.batch, self.slots = InputBatch(LIMITS), AdapterSlots(2, KNOWN)
        first = step(
            new_sequences=(new(1, 9, (1, 2), lora_id=5), new(2, 9, (3, 4))),
            sequence_ids=(1, 2),
            num_new_tokens=(4, 4),
            **activation(s0=5),
        )
        assert self.problem(first) == ""
        self.slots.activate(first)
        self.batch.apply(first)
        forward_batch = self.batch.make_forward_batch(first)
        self.batch.commit(forward_batch, np.zeros(0, np.int64), np.zeros(0, np.bool_))

    def problem(self, asked: Step) -> str:
        asked = reject_wrong(asked, LIMITS, self.slots)
        error = check_step(asked, self.batch, NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS, self.slots)
        return error.message if error else ""

    def rejection(self, asked: Step) -> str:
        """Why the only new sequence of a step fails alone."""
        assert self.problem(asked) == ""
        [sequence] = reject_wrong(asked, LIMITS, self.slots).new_sequences
        return sequence.rejection.message if sequence.rejection else ""


@pytest.fixture
def rows() -> Rows:
    return Rows()


BOTH: dict[str, Any] = {"sequence_ids": (1, 2), "num_new_tokens": (1, 1)}
GOOD: dict[str, dict[str, Any]] = {
    "the adapter that is there": BOTH,
    "another one beside it": BOTH | activation(s1=6),
    "the same one again": BOTH | activation(s0=5),
    "two that change places": BOTH | activation(s0=6, s1=5),
    "one that takes the place of an adapter whose rows wait": {"sequence_ids": (2,), "num_new_tokens": (1,)}
    | activation(s0=6),
    "a new row and its adapter": {"new_sequences": (new(9, lora_id=6),), "sequence_ids": (9,), "num_new_tokens": (3,)}
    | activation(s1=6),
    "a step that takes the slot of a row, and computes nothing": activation(s0=6),
    "a new row that waits for its adapter": {"new_sequences": (new(9, lora_id=6),)},
    "a child": {"forks": (ForkedRow(1, 8, 1, ints(5, 6)),), "sequence_ids": (8,), "num_new_tokens": (1,)},
    "a soft prompt": behind(virtual_ids(2), lora_id=SOFT),
    "a restart without it": {
        "finished_sequence_ids": (1,),
        "new_sequences": (new(1),),
        "sequence_ids": (1,),
        "num_new_tokens": (3,),
    }
    | activation(s0=6),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_keeps_the_rules_is_taken(rows: Rows, name: str) -> None:
    assert rows.problem(step(**GOOD[name])) == ""


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "an unknown adapter": ("activated_lora_ids", activation(s1=8)),
    "an unknown adapter, and a row of it": (
        "new_sequences[0].lora_id",
        {"new_sequences": (new(9, lora_id=8),)} | activation(s1=8),
    ),
    "none": ("activated_lora_ids", activation(s1=0)),
    "a slot too many": ("activated_lora_slots", activation(s2=6)),
    "a slot twice": ("activated_lora_slots", {"activated_lora_slots": (1, 1), "activated_lora_ids": (6, 7)}),
    "an adapter twice": ("activated_lora_ids", activation(s0=6, s1=6)),
    "an adapter in a second slot": ("activated_lora_ids", activation(s1=5)),
    "columns of two lengths": ("activated_lora_ids", {"activated_lora_slots": (1,), "activated_lora_ids": (6, 7)}),
    "a row whose adapter lost its slot": ("sequence_ids", BOTH | activation(s0=6)),
    "a new row whose adapter is in no slot": (
        "sequence_ids",
        {"new_sequences": (new(9, lora_id=6),), "sequence_ids": (9,), "num_new_tokens": (3,)},
    ),
    "a child whose parent's adapter lost its slot": (
        "sequence_ids",
        {"forks": (ForkedRow(1, 8, 1, ints(5, 6)),), "sequence_ids": (8,), "num_new_tokens": (1,)} | activation(s0=6),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_breaks_a_rule_is_refused(rows: Rows, name: str) -> None:
    field, fields = BAD[name]
    before = rows.slots.lora_ids.tolist()
    assert f"{field}: " in rows.problem(step(**fields))
    assert rows.slots.lora_ids.tolist() == before


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "a row of an unknown adapter": ("lora_id", {"new_sequences": (new(9, lora_id=8),)}),
    "a soft prompt that is missing": ("token_ids", behind((), lora_id=SOFT)),
    "a soft prompt that is too short": ("token_ids", behind(virtual_ids(1), lora_id=SOFT)),
    "a soft prompt that is too long": ("token_ids", behind(virtual_ids(3), lora_id=SOFT)),
    "a soft prompt in another order": ("token_ids", behind((*virtual_ids(2),)[::-1], lora_id=SOFT)),
    "a soft prompt behind a token": ("token_ids", behind((1, *virtual_ids(2)), lora_id=SOFT)),
    "a soft prompt in the output": (
        "token_ids",
        behind(virtual_ids(2), lora_id=SOFT, prompt_length=1),
    ),
    "a soft prompt and an adapter that is none": ("token_ids", behind(virtual_ids(2), lora_id=5)),
    "a soft prompt and no adapter": ("token_ids", behind(virtual_ids(2))),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_row_whose_adapter_or_virtual_tokens_are_wrong_is_rejected_alone(rows: Rows, name: str) -> None:
    field, fields = WRONG[name]
    assert f"{field}: " in rows.rejection(step(**fields))
    good = step(**GOOD["a new row that waits for its adapter"])
    assert rows.rejection(good) == ""


def test_a_worker_without_slots_takes_no_adapter() -> None:
    rows = Rows()
    rows.slots = AdapterSlots()
    assert "there are 0 slots" in rows.problem(step(**activation(s0=5)))
    assert "is not in the cache" in rows.rejection(step(new_sequences=(new(9, lora_id=5),)))


def test_an_epoch_begins_with_empty_slots(rows: Rows) -> None:
    rows.slots.clear()
    assert "are in no slot" in rows.problem(step(**BOTH))


def test_soft_prompts_are_found_by_their_ids_and_others_by_their_rows() -> None:
    slots = AdapterSlots(3, KNOWN, max_virtual_tokens=4)
    slots.activate(step(**activation(s1=SOFT, s2=5)))
    lora_ids, num_rows = ints(SOFT, 0, 5, SOFT), ints(3, 1, 2, 1)
    rows = slots.find_rows(lora_ids, num_rows)
    assert rows is not None
    assert rows.slots.tolist() == [-1, -1, -1, -1, 2, 2, -1]
    token_ids = ints(*virtual_ids(2), 7, 8, 9, 9, 9)
    assert slots.place(token_ids, lora_ids, num_rows).tolist() == [
        *(each + 4 for each in virtual_ids(2)),
        7,
        8,
        9,
        9,
        9,
    ]
    # Steps of soft prompts alone cost what steps without adapters do.
    assert slots.find_rows(ints(SOFT, 0), ints(1, 1)) is None
