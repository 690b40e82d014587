"""Models, to messages and back."""

from __future__ import annotations

import pytest

from blockyard.contract.codec.models import MODEL
from blockyard.contract.models import Model, Task

MODELS = (
    Model("m", 100, 32, False, "", False),
    Model("a", 100, 32, True, "d", True, "m", Task.EMBED, 8, ("slow",), "hermes"),
)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_survives(model: Model) -> None:
    assert MODEL.decode(MODEL.encode(model)) == model


def test_every_field_is_told() -> None:
    message = MODEL.encode(MODELS[1])
    assert len(message.ListFields()) == len(message.DESCRIPTOR.fields)


def test_a_task_of_a_later_version_is_not_known() -> None:
    message = MODEL.encode(MODELS[0])
    message.task = 77  # type: ignore[assignment]
    assert MODEL.decode(message).task is Task.UNSPECIFIED
