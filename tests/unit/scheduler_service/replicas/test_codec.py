from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import descriptor
from hypothesis import given
from hypothesis import strategies as st

from blockyard.common.v1 import pooling_pb2, sampling_pb2
from blockyard.contract.codec.progress import encode_progress
from blockyard.contract.scheduling import (
    Progress,
    SequenceError,
)
from blockyard.errors import BlockyardError, Reason, to_status
from blockyard.scheduler.v1 import scheduler_pb2
from blockyard.worker.v1 import worker_pb2
from scheduler_service.core.values import (
    BlockPair,
    DraftCounts,
    Fork,
    GroupSpec,
    NewSequence,
    OwnerUpdate,
    SchedulerOutput,
    Sources,
    StepResult,
)
from scheduler_service.replicas import codec
from scheduler_service.replicas.steps.answer_checks import AnswerLimits, WrongAnswer
from tests.kit.fakes.worker_codec import decode_step, encode_result

LIMITS = AnswerLimits(vocab_size=2**32, max_model_len=100, max_rows=100)
DRAFT_LIMITS = LIMITS._replace(max_draft_tokens=3, max_draft_rows=5)

ids = st.integers(0, 2**32 - 1)
columns = st.lists(ids, max_size=5).map(tuple)
pairs = st.lists(st.builds(BlockPair, ids, ids), max_size=4).map(tuple)


@st.composite
def new_sequences(draw: st.DrawFn) -> NewSequence:
    token_ids = draw(st.lists(ids, min_size=1, max_size=6).map(tuple))
    prompt_length = draw(st.integers(1, len(token_ids)))
    spec = GroupSpec(
        request_id="",
        owner="",
        prompt_token_ids=token_ids[:prompt_length],
        n=1,
        max_tokens=0,
        min_tokens=draw(ids),
        stop_token_ids=draw(st.frozensets(ids, max_size=3)),
        payload=sampling_pb2.SamplingParams(temperature=0.5, seed=draw(ids)).SerializeToString(),
        pooling=draw(st.sampled_from([None, pooling_pb2.Pooling(kind=1, dimensions=3).SerializeToString()])),
    )
    numbers = draw(ids), draw(ids), token_ids, prompt_length, draw(ids), draw(columns)
    return NewSequence(*numbers, spec, draw(ids), draw(ids), draw(columns))


def make_output(tables: list[tuple[int, tuple[int, ...], tuple[int, ...]]], **fields: Any) -> SchedulerOutput:
    """A step that replaces tables: of each sequence all blocks, and its fixed ones or none of these."""
    replaced = tuple((key, table) for key, table, _ in tables)
    return SchedulerOutput(
        **fields,
        replaced_tables=replaced,
        replaced_fixed_tables=tuple((key, fixed) for key, _, fixed in tables if fixed),
    )


steps = st.builds(
    make_output,
    st.lists(st.tuples(ids, columns, columns), max_size=2, unique_by=lambda table: table[0]),
    step_id=ids,
    new_sequences=st.lists(new_sequences(), max_size=2).map(tuple),
    forks=st.lists(st.builds(Fork, ids, ids, ids, columns, columns), max_size=2).map(tuple),
    sequence_ids=columns,
    num_new_tokens=columns,
    appended_sequence_ids=columns,
    appended_block_ids=columns,
    blocks_to_swap_out=pairs,
    blocks_to_swap_in=pairs,
    blocks_to_copy=pairs,
    finished_sequence_ids=columns,
    input_ids=st.lists(st.tuples(ids, ids), max_size=3).map(tuple),
    activated_loras=st.lists(st.tuples(ids, ids), max_size=3).map(tuple),
    max_draft_tokens=columns,
    draft_prices=columns,
)


@given(steps, ids)
def test_a_step_arrives_as_it_was_sent(step: SchedulerOutput, epoch: int) -> None:
    data = codec.encode_step(step, epoch).SerializeToString()
    message = worker_pb2.ExecuteModelRequest.FromString(data)
    assert message.epoch == epoch
    assert decode_step(message) == step


def test_an_empty_step_says_only_who_it_is() -> None:
    message = codec.encode_step(SchedulerOutput(step_id=7), 3)
    assert [field.name for field, _ in message.ListFields()] == ["epoch", "step_id"]


candidates = st.dictionaries(
    ids, st.lists(st.tuples(ids, st.floats(max_value=0, width=32, allow_nan=False)), max_size=3).map(tuple)
)


errors = st.builds(SequenceError, st.sampled_from(Reason).map(str), st.sampled_from(["", "bad row"]))


@given(columns, columns, st.lists(st.tuples(ids, errors), max_size=2), candidates)
def test_an_answer_arrives_as_it_was_sent(
    token_ids: tuple[int, ...],
    skipped: tuple[int, ...],
    failures: list[tuple[int, SequenceError]],
    beam_candidates: dict[int, tuple[tuple[int, float], ...]],
) -> None:
    result = StepResult(
        5,
        tuple(range(len(token_ids))),
        token_ids,
        skipped,
        tuple(failures),
        beam_candidates=beam_candidates or None,
        forward_seconds=pytest.approx(0.001),
    )
    data = encode_result(result, 2, 0.001).SerializeToString()
    assert codec.decode_answer(worker_pb2.ExecuteModelResponse.FromString(data), LIMITS) == result


@given(st.lists(st.lists(ids, max_size=4), min_size=1, max_size=5), st.integers(0, 5))
def test_runs_arrive_as_they_were_sent(runs: list[list[int]], num_drafted: int) -> None:
    token_ids = tuple(token_id for run in runs for token_id in run)
    result = StepResult(
        5,
        tuple(range(len(runs))),
        token_ids,
        num_tokens=tuple(map(len, runs)),
        num_draft_tokens=num_drafted,
        num_accepted_tokens=num_drafted // 2,
        forward_seconds=pytest.approx(0.001),
    )
    data = encode_result(result, 2, 0.001).SerializeToString()
    assert codec.decode_answer(worker_pb2.ExecuteModelResponse.FromString(data), DRAFT_LIMITS) == result


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"num_tokens": [1]}, "1 counts for 2 sequences"),
        ({"num_tokens": [2, 2]}, "3 tokens where num_tokens counts 4"),
        ({"num_tokens": [0, 3], "token_ids": [1, 2, 2**32 - 1]}, "not in the vocabulary"),
        ({"num_tokens": [0, 5], "token_ids": [1] * 5}, "at most 4"),
        ({"num_draft_tokens": 6}, "a step has 5"),
        ({"num_draft_tokens": 3, "num_accepted_tokens": 4}, "4 of 3 drafts"),
        ({"num_draft_tokens": 2, "num_forced_tokens": 3}, "of some sources"),
        ({"num_draft_tokens": 2, "num_forced_tokens": 1, "num_accepted_forced_tokens": 1}, "of some sources"),
        ({"predicted_sequence_ids": [4], "num_predicted_tokens": [1]}, "other lengths"),
        ({"predicted_sequence_ids": [4, 4], "num_predicted_tokens": [0, 0]}, "appears twice"),
        ({"predicted_sequence_ids": range(106)}, "106 sequences"),
        (
            {"predicted_sequence_ids": [4], "num_predicted_tokens": [1], "num_accepted_predicted_tokens": [2]}
            | {"num_draft_tokens": 5, "num_accepted_tokens": 3},
            "of some sources",
        ),
        ({"logprob_sequence_ids": [4] * 5}, "appears 5 times"),
        ({"logprob_sequence_ids": range(106)}, "106 sequences"),
    ],
)
def test_runs_that_cannot_be_are_refused(told: dict[str, Any], message: str) -> None:
    fields = {"sequence_ids": [4, 5], "token_ids": [1, 2, 3], "num_tokens": [1, 2]} | told
    with pytest.raises(WrongAnswer, match=message):
        codec.decode_answer(worker_pb2.ExecuteModelResponse(**fields), DRAFT_LIMITS._replace(vocab_size=2**31))


def test_drafts_arrive_with_their_sources() -> None:
    columns = {
        "predicted_sequence_ids": [4, 5],
        "num_predicted_tokens": [2, 1],
        "num_accepted_predicted_tokens": [1, 0],
    }
    answer = worker_pb2.ExecuteModelResponse(
        sequence_ids=[4, 5],
        token_ids=[1, 2, 3, 4],
        num_tokens=[3, 1],
        num_draft_tokens=5,
        num_accepted_tokens=2,
        num_forced_tokens=1,
        num_accepted_forced_tokens=1,
        **columns,
    )
    result = codec.decode_answer(answer, DRAFT_LIMITS)
    assert result.predictions == ((4, 2, 1), (5, 1, 0))
    assert result.draft_counts == DraftCounts(Sources(1, 1, 3), Sources(0, 1, 1))


def test_who_does_not_draft_has_one_token() -> None:
    answer = worker_pb2.ExecuteModelResponse(sequence_ids=[4], token_ids=[1, 2], num_tokens=[2])
    with pytest.raises(WrongAnswer, match="at most 1"):
        codec.decode_answer(answer, LIMITS)


def test_a_steps_time_is_that_of_its_parts_without_the_queue() -> None:
    times = worker_pb2.StepTimes()
    for part, seconds in (
        (times.queue, 9.0),
        (times.cache_operations, 0.25),
        (times.forward, 1.5),
        (times.sample, 0.1),
    ):
        part.FromNanoseconds(int(seconds * 1e9))
    result = codec.decode_answer(worker_pb2.ExecuteModelResponse(times=times), LIMITS)
    assert (result.forward_seconds, result.cache_seconds) == (pytest.approx(1.6), 0.25)
    assert codec.decode_answer(worker_pb2.ExecuteModelResponse(), LIMITS).forward_seconds == 0.0


def test_a_refusal_is_raised_as_the_worker_told_it() -> None:
    refusal = to_status(BlockyardError(Reason.BUG, "block 9 is out of range"))
    with pytest.raises(BlockyardError, match="block 9 is out of range") as caught:
        codec.decode_answer(worker_pb2.ExecuteModelResponse(epoch=1, step_id=1, refusal=refusal), LIMITS)
    assert caught.value.reason is Reason.BUG


def test_sampling_parameters_travel_unread() -> None:
    sampling = sampling_pb2.SamplingParams(temperature=0.7, top_k=5, seed=9, logit_bias={3: -1.0})
    spec = GroupSpec("a", "o", (1, 2), 1, 4, 0, frozenset(), sampling.SerializeToString())
    message = codec.encode_step(SchedulerOutput(1, (NewSequence(1, 0, (1, 2), 2, 0, (1,), spec),)), 1)
    assert message.new_sequences[0].sampling_params == sampling.SerializeToString()


def test_log_probabilities_pass_through() -> None:
    columns = sampling_pb2.Logprobs(num_candidates=[1, 1], token_ids=[1, 9], logprobs=[-1.0, -0.5], ranks=[2, 1])
    piece = sampling_pb2.PromptLogprobs(sequence_id=4, first_position=1, logprobs=columns)
    answer = worker_pb2.ExecuteModelResponse(
        step_id=1, logprob_sequence_ids=[4, 5], logprobs=columns, prompt_logprobs=[piece]
    )
    result = codec.decode_answer(answer, LIMITS)
    update = OwnerUpdate(logprobs=list(result.logprobs), prompt_logprobs=list(result.prompt_logprobs))
    assert encode_progress(Progress(update=update)) == scheduler_pb2.AttachResponse(
        logprob_sequence_ids=[4, 5], logprobs=columns, prompt_logprobs=[piece]
    )


def test_hot_columns_are_packed() -> None:
    """One length for a column instead of a tag for each number; proto3 packs scalars unless told otherwise."""
    for message in (worker_pb2.ExecuteModelRequest, worker_pb2.ExecuteModelResponse, scheduler_pb2.AttachResponse):
        for field in message.DESCRIPTOR.fields:
            if field.is_repeated and field.cpp_type != descriptor.FieldDescriptor.CPPTYPE_MESSAGE:
                assert field.is_packed, field.full_name
