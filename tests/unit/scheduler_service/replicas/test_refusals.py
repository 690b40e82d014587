from __future__ import annotations

import pytest

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from scheduler_service.core.values import Fork, GroupSpec, NewSequence, SchedulerOutput
from scheduler_service.replicas.refusals import Refusals, all_sequences, named_sequences

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


def test_who_meets_the_same_twice_without_a_token_is_hopeless() -> None:
    refusals, live = Refusals(), {"a": 0.0, "b": 0.0, "c": 0.0}
    assert refusals.note("step 9: broken", {"a": 5, "b": 2}, live) == []
    assert refusals.note("step 3: broken", {"a": 5, "b": 3, "c": 5}, live) == ["a"]
    assert refusals.note("step 4: broken", {"b": 3, "c": 6}, live) == ["b"]


def test_another_refusal_is_another_matter() -> None:
    refusals, live = Refusals(), {"a": 0.0}
    assert refusals.note("broken", {"a": 5}, live) == []
    assert refusals.note("torn", {"a": 5}, live) == []
    assert refusals.note("torn", {"a": 5}, live) == ["a"]


def test_a_refusal_of_others_in_between_does_not_clear_it() -> None:
    refusals, live = Refusals(), {"a": 0.0, "b": 0.0}
    refusals.note("broken", {"a": 5}, live)
    refusals.note("broken", {"b": 5}, live)
    assert refusals.note("broken", {"a": 5}, live) == ["a"]


def test_a_later_request_of_the_same_name_is_not_to_blame() -> None:
    refusals = Refusals()
    refusals.note("broken", {"a": 0}, {"a": 0.0})
    refusals.note("broken", {"b": 0}, {"b": 0.0})
    assert refusals.note("broken", {"a": 0}, {"a": 0.0, "b": 0.0}) == []
