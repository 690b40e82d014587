from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from blockyard.common.v1 import sampling_pb2
from blockyard.scheduler.v1 import scheduler_pb2
from gateway.request import EarlyStopping, FinishReason
from gateway.scheduler_messages import AbortReason

if TYPE_CHECKING:
    from enum import IntEnum


@pytest.mark.parametrize(
    ("ours", "contract"),
    [
        (FinishReason, sampling_pb2.FinishReason),
        (EarlyStopping, sampling_pb2.EarlyStopping),
        (AbortReason, scheduler_pb2.AbortReason),
    ],
)
def test_enums_have_the_numbers_of_the_contract(ours: type[IntEnum], contract: Any) -> None:
    (prefix,) = (name.removesuffix("UNSPECIFIED") for name, number in contract.items() if number == 0)
    assert {f"{prefix}{each.name}": each.value for each in ours} == {
        name: number for name, number in contract.items() if number
    }
