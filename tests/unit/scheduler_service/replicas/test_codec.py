from __future__ import annotations

import math
from typing import Any

import pytest
from google.protobuf import descriptor
from hypothesis import given
from hypothesis import strategies as st

from blockyard.common.v1 import pooling_pb2, sampling_pb2, status_pb2
from blockyard.errors import BlockyardError, Reason, from_status, to_status
from blockyard.logprob_columns import Candidates, join_logprobs
from blockyard.parallel import Parallel
from blockyard.scheduler.v1 import scheduler_pb2
from blockyard.worker.v1 import worker_pb2
from scheduler_service.core.sequence import Group
from scheduler_service.core.values import (
    BeamSpec,
    BlockPair,
    EarlyStopping,
    FinishedSequence,
    FinishReason,
    Fork,
    GroupSpec,
    NewSequence,
    OwnerUpdate,
    SchedulerOutput,
    SequenceError,
    StepResult,
)
from scheduler_service.gateways import codec as gateway_codec
from scheduler_service.gateways.messages import (
    Abort,
    Accepted,
    Addition,
    Failed,
    Outgoing,
    Recovery,
    Resubmission,
    make_resumed,
)
from scheduler_service.replicas import codec
from scheduler_service.replicas.facts import (
    CachePlan,
    LoadedModel,
    LoadProgress,
    ModelFacts,
    Readiness,
    WorkerState,
)
from scheduler_service.replicas.steps.answer_checks import AnswerLimits
from tests.kit.fakes.worker_codec import decode_step, encode_result

LIMITS = AnswerLimits(vocab_size=2**32, max_model_len=100, max_rows=100)

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
    return NewSequence(draw(ids), draw(ids), token_ids, prompt_length, draw(ids), draw(columns), spec, draw(ids))


steps = st.builds(
    SchedulerOutput,
    step_id=ids,
    new_sequences=st.lists(new_sequences(), max_size=2).map(tuple),
    forks=st.lists(st.builds(Fork, ids, ids, ids, columns), max_size=2).map(tuple),
    sequence_ids=columns,
    num_new_tokens=columns,
    appended_sequence_ids=columns,
    appended_block_ids=columns,
    replaced_tables=st.lists(st.tuples(ids, columns), max_size=2).map(tuple),
    blocks_to_swap_out=pairs,
    blocks_to_swap_in=pairs,
    blocks_to_copy=pairs,
    finished_sequence_ids=columns,
    input_ids=st.lists(st.tuples(ids, ids), max_size=3).map(tuple),
    activated_loras=st.lists(st.tuples(ids, ids), max_size=3).map(tuple),
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
    add = scheduler_pb2.AddRequest(request_id="a", prompt_token_ids=[1, 2], n=1, sampling=sampling, max_tokens=4)
    spec = gateway_codec.decode_add(add, "owner").spec
    new = NewSequence(1, 0, (1, 2), 2, 0, (1,), spec)
    message = codec.encode_step(SchedulerOutput(1, (new,)), 1)
    assert message.new_sequences[0].sampling == sampling


def test_a_request_is_decoded_whole() -> None:
    add = scheduler_pb2.AddRequest(
        request_id="a", prompt_token_ids=[5, 6], n=3, max_tokens=4, min_tokens=2, stop_token_ids=[7, 8]
    )
    add.handle, add.body_digest, add.tenant, add.priority = 7, b"digest", "t", -2
    add.max_queue_time.FromMilliseconds(1500)
    add.fails_on_update = True
    told = scheduler_pb2.AddRequest()
    told.CopyFrom(add)
    told.ClearField("handle")
    addition = gateway_codec.decode_add(add, "o")
    expected = GroupSpec("a", "o", (5, 6), 3, 4, 2, frozenset({7, 8}), b"", tenant="t", priority=-2)
    assert addition == Addition(expected, 7, b"digest", told.SerializeToString(), 1.5, fails_on_update=True)


@pytest.mark.parametrize(
    ("message", "beams"),
    [
        (sampling_pb2.BeamSearch(width=4), BeamSpec(4, 1.0, EarlyStopping.HEURISTIC)),
        (
            sampling_pb2.BeamSearch(width=2, length_penalty=0.0, early_stopping=sampling_pb2.EARLY_STOPPING_FIRST),
            BeamSpec(2, 0.0, EarlyStopping.FIRST),
        ),
        (
            sampling_pb2.BeamSearch(width=2, length_penalty=-0.5, early_stopping=sampling_pb2.EARLY_STOPPING_NEVER),
            BeamSpec(2, -0.5, EarlyStopping.NEVER),
        ),
    ],
)
def test_a_beam_search_is_decoded(message: sampling_pb2.BeamSearch, beams: BeamSpec) -> None:
    add = scheduler_pb2.AddRequest(request_id="a", prompt_token_ids=[5], n=1, max_tokens=4, beam_search=message)
    assert gateway_codec.decode_add(add, "o").spec.beams == beams


def test_scores_are_told_where_there_are_some() -> None:
    ends = [FinishedSequence(1, FinishReason.STOP), FinishedSequence(2, FinishReason.LENGTH, score=-1.5)]
    message = gateway_codec.encode_outgoing(Outgoing(update=OwnerUpdate(finished=ends)))
    assert list(message.finish_scores) == pytest.approx([math.nan, -1.5], nan_ok=True)
    message = gateway_codec.encode_outgoing(Outgoing(update=OwnerUpdate(finished=ends[:1])))
    assert not message.finish_scores


def test_scores_are_kept_through_a_resume_and_a_resubmission() -> None:
    group = Group(GroupSpec("a", "o", (1, 2), 2, 9, 0, frozenset(), beams=BeamSpec(2)), 7, 11, 0.0)
    resumed = gateway_codec.encode_resumed(make_resumed(1, b"", group))
    assert [sequence.HasField("score") for sequence in resumed.sequences] == [False, False]
    group.continue_from([[3], [4]], [FinishReason.STOP, FinishReason.LENGTH])
    group.sequences[0].score, group.sequences[1].score = -0.5, -2.0
    transcripts = gateway_codec.encode_resumed(make_resumed(1, b"", group)).sequences
    add = scheduler_pb2.AddRequest(request_id="a", prompt_token_ids=[1, 2], n=2, max_tokens=4)
    add.resubmission.sequences.extend(transcripts)
    before = gateway_codec.decode_add(add, "o").resubmission
    assert before is not None
    assert before.scores == [-0.5, -2.0]


def test_numbers_are_kept_through_a_resume_and_a_resubmission() -> None:
    pooling = pooling_pb2.Pooling(kind=pooling_pb2.POOLING_KIND_MEAN, normalise=True)
    add = scheduler_pb2.AddRequest(request_id="a", prompt_token_ids=[1, 2], n=1, pooling=pooling)
    addition = gateway_codec.decode_add(add, "o")
    assert addition.spec.pooling == pooling.SerializeToString()
    assert addition.spec.computes_prompt
    group = Group(addition.spec, 7, 2, 0.0)
    group.continue_from([[]], [FinishReason.STOP])
    group.sequences[0].pooled = b"1234abcd"
    resumed = gateway_codec.encode_resumed(make_resumed(1, addition.message, group))
    add.resubmission.sequences.extend(resumed.sequences)
    before = gateway_codec.decode_add(add, "o").resubmission
    assert before is not None
    assert before.pooled == [b"1234abcd"]
    ends = [FinishedSequence(7, FinishReason.STOP), FinishedSequence(8, FinishReason.STOP)]
    update = OwnerUpdate(finished=ends, pooled=[(7, b"1234abcd"), (8, b"5678")])
    message = gateway_codec.encode_outgoing(Outgoing(update=update))
    assert (message.pooled_sequence_ids, message.pooled_sizes, message.pooled_values) == (
        [7, 8],
        [2, 1],
        b"1234abcd5678",
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 2}, "n"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"pooling": {"kind": 0}}, "pooling.kind"),
        ({"pooling": {"kind": 6}}, "pooling.label_token_ids"),
        ({"pooling": {"kind": 1, "label_token_ids": [3]}}, "pooling.label_token_ids"),
        ({"beam_search": {"width": 2}}, "beam_search"),
        ({"sampling": {"prompt_logprobs": 1}}, "sampling.prompt_logprobs"),
    ],
)
def test_numbers_and_tokens_at_once_are_refused(fields: dict[str, Any], named: str) -> None:
    right = {"request_id": "a", "prompt_token_ids": [1], "n": 1, "pooling": {"kind": 1}}
    with pytest.raises(BlockyardError) as caught:
        gateway_codec.decode_add(scheduler_pb2.AddRequest(**right | fields), "o")
    assert [violation.field for violation in caught.value.violations] == [named]


def test_where_a_request_was_before_is_decoded_by_index() -> None:
    add = scheduler_pb2.AddRequest(request_id="a", prompt_token_ids=[5, 6], n=2, max_tokens=4)
    add.resubmission.age.FromMilliseconds(2500)
    add.resubmission.num_cached_tokens = 3
    columns = sampling_pb2.Logprobs(
        num_candidates=[2, 1], token_ids=[1, 9, 2], logprobs=[-1.0, -0.5, -0.25], ranks=[2, 1, 1]
    )
    reason = sampling_pb2.FINISH_REASON_STOP
    add.resubmission.sequences.add(token_ids=[1, 2], finish_reason=reason, logprobs=columns)
    add.resubmission.sequences.add()
    before = gateway_codec.decode_add(add, "o").resubmission
    entries = [Candidates([1, 9], [-1.0, -0.5], [2, 1]), Candidates([2], [-0.25], [1])]
    assert before == Resubmission(
        2.5, [[1, 2], []], [FinishReason.STOP, None], [entries, []], 3, [None, None], [None, None], [b"", b""]
    )
    assert join_logprobs(entries) == columns


def test_a_resubmission_tells_of_every_sequence() -> None:
    add = scheduler_pb2.AddRequest(request_id="a", prompt_token_ids=[5, 6], n=2, max_tokens=4)
    add.resubmission.sequences.add()
    with pytest.raises(BlockyardError) as caught:
        gateway_codec.decode_add(add, "o")
    assert [violation.field for violation in caught.value.violations] == ["resubmission.sequences"]


def test_a_request_is_told_again_with_all_that_came_of_it() -> None:
    add = scheduler_pb2.AddRequest(request_id="a", prompt_token_ids=[5, 6], n=2, max_tokens=4, gateway_state=b"state")
    addition = gateway_codec.decode_add(add, "o")
    group = Group(addition.spec, 30, 6, 0.0)
    group.continue_from([[1, 2], [3]], [FinishReason.STOP, None])
    group.num_cached_tokens = 1
    message = gateway_codec.encode_resumed(make_resumed(4, addition.message, group))
    assert (message.handle, message.first_sequence_id, message.num_cached_tokens) == (4, 30, 1)
    assert message.request == add
    assert [list(sequence.token_ids) for sequence in message.sequences] == [[1, 2], [3]]
    assert [sequence.finish_reason for sequence in message.sequences] == [sampling_pb2.FINISH_REASON_STOP, 0]


def test_log_probabilities_pass_through() -> None:
    columns = sampling_pb2.Logprobs(num_candidates=[1, 1], token_ids=[1, 9], logprobs=[-1.0, -0.5], ranks=[2, 1])
    piece = sampling_pb2.PromptLogprobs(sequence_id=4, first_position=1, logprobs=columns)
    answer = worker_pb2.ExecuteModelResponse(
        step_id=1, logprob_sequence_ids=[4, 5], logprobs=columns, prompt_logprobs=[piece]
    )
    result = codec.decode_answer(answer, LIMITS)
    assert result.logprobs is not None
    update = OwnerUpdate(logprobs=list(result.logprobs.items()), prompt_logprobs=list(result.prompt_logprobs))
    message = gateway_codec.encode_outgoing(Outgoing(update=update))
    assert message == scheduler_pb2.AttachResponse(
        logprob_sequence_ids=[4, 5], logprobs=columns, prompt_logprobs=[piece]
    )


def test_what_no_gateway_should_send_is_told_at_once() -> None:
    with pytest.raises(BlockyardError) as caught:
        gateway_codec.decode_add(scheduler_pb2.AddRequest(request_id="a", n=1), "o")
    assert caught.value.reason is Reason.FIELD_INVALID
    assert [violation.field for violation in caught.value.violations] == ["prompt_token_ids", "max_tokens"]


@pytest.mark.parametrize(
    ("message", "abort"),
    [
        (scheduler_pb2.AbortRequest(request_id="a"), Abort("a", None, FinishReason.ABORT)),
        (
            scheduler_pb2.AbortRequest(request_id="a", sequence_index=0, reason=scheduler_pb2.ABORT_REASON_CLIENT),
            Abort("a", 0, FinishReason.ABORT),
        ),
        (
            scheduler_pb2.AbortRequest(request_id="a", sequence_index=2, reason=scheduler_pb2.ABORT_REASON_STOP_STRING),
            Abort("a", 2, FinishReason.STOP, 0),
        ),
    ],
)
def test_aborts(message: scheduler_pb2.AbortRequest, abort: Abort) -> None:
    assert gateway_codec.decode_abort(message) == abort


def test_what_a_gateway_is_told() -> None:
    update = OwnerUpdate(
        sequence_ids=[4, 5, 4],
        token_ids=[40, 50, 41],
        finished=[FinishedSequence(4, FinishReason.STOP), FinishedSequence(5, FinishReason.LENGTH)],
        prefilled=[(4, 16)],
    )
    facts = ModelFacts("digest", 100, 64, 16, "id", True, 8)
    error = BlockyardError(Reason.NEVER_FITS, "too long")
    recovered = [Recovery("c", "lost", 9, True)]
    accepted, failed = Accepted("a", 4, 1), Failed("b", error, 2)
    outgoing = Outgoing(facts, Readiness(True), [accepted], [failed], [], update, recovered)
    message = gateway_codec.encode_outgoing(outgoing)
    assert message == scheduler_pb2.AttachResponse(
        facts=scheduler_pb2.ModelFacts(
            model_digest="digest",
            vocab_size=100,
            max_model_len=64,
            block_size=16,
            determinism_id="id",
            batch_invariant=True,
            max_num_seqs=8,
        ),
        readiness=scheduler_pb2.Readiness(ready=True),
        accepted=[scheduler_pb2.RequestAccepted(request_id="a", first_sequence_id=4, handle=1)],
        failed=[scheduler_pb2.RequestFailed(request_id="b", status=to_status(error), handle=2)],
        sequence_ids=[4, 5, 4],
        token_ids=[40, 50, 41],
        finished_sequence_ids=[4, 5],
        finish_reasons=[sampling_pb2.FINISH_REASON_STOP, sampling_pb2.FINISH_REASON_LENGTH],
        prefilled_sequence_ids=[4],
        num_cached_tokens=[16],
        recovered=[scheduler_pb2.RequestRecovered(request_id="c", cause="lost", num_replayed_tokens=9, exact=True)],
    )
    assert from_status(message.failed[0].status) == error


def test_nothing_is_told_as_nothing() -> None:
    assert gateway_codec.encode_outgoing(Outgoing()).ByteSize() == 0


def test_not_ready_is_told_although_it_is_the_default() -> None:
    message = gateway_codec.encode_outgoing(Outgoing(readiness=Readiness(False)))
    assert message.HasField("readiness")


def test_the_cache_plan_says_everything() -> None:
    message = codec.encode_cache_plan(CachePlan(16, 100, 10, 512, 2048, 256))
    assert {field.name: value for field, value in message.ListFields()} == {
        "block_size": 16,
        "num_device_blocks": 100,
        "num_host_blocks": 10,
        "max_model_len": 512,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 256,
    }


@pytest.mark.parametrize("state", WorkerState)
def test_worker_states_are_those_of_the_contract(state: WorkerState) -> None:
    value = status_pb2.WorkerState.Value(f"WORKER_STATE_{state.value}")
    assert codec.decode_worker_info(worker_pb2.GetWorkerInfoResponse(incarnation="i", state=value)).state is state


def test_a_worker_without_model_and_cache_has_none() -> None:
    info = codec.decode_worker_info(
        worker_pb2.GetWorkerInfoResponse(incarnation="i", state=status_pb2.WORKER_STATE_CREATED, epoch=4)
    )
    assert (info.model, info.cache, info.epoch) == (None, None, 4)


def test_loading_events() -> None:
    progress = worker_pb2.LoadModelResponse(progress=worker_pb2.LoadProgress(done_bytes=1, total_bytes=3))
    assert codec.decode_load_event(progress) == LoadProgress(1, 3)
    loaded = worker_pb2.LoadModelResponse(
        loaded=worker_pb2.LoadedModel(architecture="A", vocab_size=9, max_model_len=8, model_digest="d")
    )
    assert codec.decode_load_event(loaded) == LoadedModel("A", 9, 8, "d", 0)


def test_every_choice_of_the_settings_has_its_enum() -> None:
    assert codec.encode_init_device("cpu", "bfloat16", "d", Parallel()) == worker_pb2.InitDeviceRequest(
        device_type=worker_pb2.DEVICE_TYPE_CPU, dtype=worker_pb2.DTYPE_BFLOAT16, configuration_digest="d"
    )
    for device in ("auto", "cpu", "cuda"):
        for dtype in ("auto", "float32", "bfloat16", "float16"):
            codec.encode_init_device(device, dtype, "", Parallel())
    assert codec.encode_load_model("m", "r", "none", "auto") == worker_pb2.LoadModelRequest(
        model="m", revision="r", format=worker_pb2.LOAD_FORMAT_AUTO
    )
    assert codec.encode_load_model("m", "", "int8", "auto").quantization == worker_pb2.QUANTIZATION_INT8
    assert codec.encode_load_model("m", "", "none", "random").format == worker_pb2.LOAD_FORMAT_RANDOM


def test_hot_columns_are_packed() -> None:
    """One length for a column instead of a tag for each number; proto3 packs scalars unless told otherwise."""
    for message in (worker_pb2.ExecuteModelRequest, worker_pb2.ExecuteModelResponse, scheduler_pb2.AttachResponse):
        for field in message.DESCRIPTOR.fields:
            if field.is_repeated and field.cpp_type != descriptor.FieldDescriptor.CPPTYPE_MESSAGE:
                assert field.is_packed, field.full_name
