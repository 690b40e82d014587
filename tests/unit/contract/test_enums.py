"""Enums that stand for the contract's have its names and numbers."""

from enum import IntEnum
from typing import Any

import pytest

from blockyard.common.v1 import sampling_pb2
from scheduler_service.core.values import EarlyStopping, FinishReason


@pytest.mark.parametrize(
    ("ours", "contract", "prefix"),
    [
        (FinishReason, sampling_pb2.FinishReason, "FINISH_REASON_"),
        (EarlyStopping, sampling_pb2.EarlyStopping, "EARLY_STOPPING_"),
    ],
)
def test_numbers_are_those_of_the_contract(ours: type[IntEnum], contract: Any, prefix: str) -> None:
    named = {f"{prefix}{each.name}": each.value for each in ours}
    assert {**named, f"{prefix}UNSPECIFIED": 0} == dict(contract.items())
