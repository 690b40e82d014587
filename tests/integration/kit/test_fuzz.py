"""A short cut of `make fuzz`: no message of a peer ends a process or an epoch, or an error that nobody thought of."""

from __future__ import annotations

import random

import pytest

from blockyard.worker.v1 import worker_pb2
from tests.kit.fuzz.mutations import mutate
from tests.kit.fuzz.targets import TARGETS, fuzz

# Those that compute what they take.
NUM_CASES = {"ExecuteModelRequest": 60, "disturbances": 200}


@pytest.mark.parametrize("name", TARGETS)
async def test_whatever_a_peer_says_is_taken_or_refused(name: str) -> None:
    report = await fuzz(name, NUM_CASES.get(name, 300), seed=1)
    assert not report.surprises, "\n".join([str(report), *report.traces])
    assert report.outcomes.total() >= report.num_cases


def test_a_seed_repeats_its_changes_and_another_makes_others() -> None:
    base = worker_pb2.ExecuteModelResponse(epoch=1, step_id=2, sequence_ids=[1, 2, 3], token_ids=[4, 5, 6])

    def changes(seed: int) -> list[bytes | None]:
        rng = random.Random(seed)
        changed = (mutate(base, rng) for _ in range(200))
        return [message and message.SerializeToString(deterministic=True) for message in changed]

    assert changes(1) == changes(1)
    assert changes(1) != changes(2)
    assert len(set(changes(1))) > 50
    assert base.epoch == 1, "the base itself was changed"
