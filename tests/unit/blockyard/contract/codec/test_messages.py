"""Each enum of the contract has the names of its generated enum, in the same order, and reads what it does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from blockyard.common.v1 import pooling_pb2, sampling_pb2
from blockyard.contract.chat import Role, ToolChoice
from blockyard.contract.codec import request, scheduling, worker_info, workers
from blockyard.contract.codec.sampling import EARLY_STOPPING, decode_reason
from blockyard.contract.models import Task
from blockyard.contract.pooling import PoolingKind
from blockyard.contract.request import OnDisconnect, OnUpdate
from blockyard.contract.sampling import EarlyStopping, FinishReason
from blockyard.inference.v1 import inference_pb2

if TYPE_CHECKING:
    from enum import StrEnum

    from blockyard.contract.codec.messages import EnumCodec

NUMBER_OF_A_LATER_VERSION = 500_000


@pytest.mark.parametrize(
    ("members", "generated"),
    [
        (EarlyStopping, sampling_pb2.EarlyStopping),
        (FinishReason, sampling_pb2.FinishReason),
        (OnDisconnect, inference_pb2.OnDisconnect),
        (OnUpdate, inference_pb2.OnUpdate),
        (PoolingKind, pooling_pb2.PoolingKind),
        (Role, inference_pb2.Role),
        (Task, pooling_pb2.Task),
        (ToolChoice, inference_pb2.ToolChoice),
    ],
)
def test_names_are_those_of_the_contract(members: type[StrEnum], generated: Any) -> None:
    names = [name for name, number in generated.items() if number]
    (prefix,) = (name.removesuffix("UNSPECIFIED") for name, number in generated.items() if not number)
    assert [prefix + member.name for member in members if member.name != "UNSPECIFIED"] == names


@pytest.mark.parametrize(
    "codec",
    [
        EARLY_STOPPING,
        request._ON_DISCONNECT,
        request._ON_UPDATE,
        scheduling._ABORT_REASONS,
        worker_info.COLLECTIVES,
        worker_info.STATES,
        workers.DEVICE_TYPES,
        workers.DTYPES,
        workers.LOAD_FORMATS,
        workers.QUANTIZATIONS,
        workers.TASKS,
    ],
)
def test_a_number_of_a_later_version_is_read_as_zero(codec: EnumCodec[Any, Any]) -> None:
    assert codec.find(NUMBER_OF_A_LATER_VERSION) is None
    assert codec.decode(NUMBER_OF_A_LATER_VERSION) is codec.decode(0)


def test_a_finish_reason_of_a_later_version_is_an_error() -> None:
    assert decode_reason(NUMBER_OF_A_LATER_VERSION) is FinishReason.ERROR
