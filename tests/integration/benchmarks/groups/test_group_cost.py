"""A short cut of benchmarks/groups/group_cost.py: processes form a group, add, and one of them ends it."""

from __future__ import annotations

from benchmarks.groups import group_cost


def test_adding_and_freeing_are_measured() -> None:
    result = group_cost.operate(2, num_operations=1)
    assert result["free_ms"]["min"] > 0
    assert [each["num_bytes"] for each in result["operations"]] == list(group_cost.ROW_BYTES)
    assert all(each["ratio"]["median"] > 0 for each in result["operations"])
