from __future__ import annotations

import pytest

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from scheduler_service.core.values import Fork, GroupSpec, NewSequence, SchedulerOutput
from scheduler_service.replicas.epoch_failure import all_sequences, named_sequences

SPEC = GroupSpec("r", "o", (1,), 1, 1, 0, frozenset())
STEP = SchedulerOutput(
    step_id=1,
    new_sequences=(NewSequence(7, 0, (1,), 1, 0, (1,), SPEC),),
    forks=(Fork(3, 4, 1, (2,)),),
    sequence_ids=(3, 4, 5),
    num_new_tokens=(1, 0, 1),
    appended_sequence_ids=(5,),
    appended_block_ids=(9,),
)


@pytest.mark.parametrize(
    ("field", "sequence_ids"),
    [
        ("new_sequences[0].block_ids", [7]),
        ("forks[0]", [4]),
        ("num_new_tokens[2]", [5]),
        ("max_draft_tokens[0]", [3]),
        ("appended_block_ids[0]", [5]),
        ("sequence_ids[9]", []),
        ("blocks_to_copy", []),
    ],
)
def test_a_refusal_names_sequences_by_the_fields_that_are_wrong(field: str, sequence_ids: list[int]) -> None:
    assert named_sequences(STEP, invalid([Violation(field, "wrong")])) == sequence_ids


def test_a_refusal_without_violations_names_none_and_may_be_any_ones() -> None:
    assert named_sequences(STEP, BlockyardError(Reason.BUG, "out of memory")) == []
    assert all_sequences(STEP) == [7, 4, 3, 4, 5]
