"""Messages to values and back: every field arrives where it belongs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blockyard.common.v1 import pooling_pb2, sampling_pb2
from blockyard.contract.pooling import Pooling, PoolingKind
from blockyard.contract.sampling import SamplingParams
from blockyard.errors import BlockyardError, Reason, from_status
from blockyard.worker.v1 import worker_pb2 as pb
from worker_service import codec
from worker_service.step import DEFAULT_TIMEOUT_SECONDS, StepOutput, StepTimes


def test_a_step_arrives_whole() -> None:
    step = codec.decode_step(
        pb.ExecuteModelRequest(
            epoch=3,
            step_id=4,
            new_sequences=[
                pb.NewSequence(
                    sequence_id=2**60,
                    sequence_index=1,
                    token_ids=[5, 6, 7],
                    prompt_length=2,
                    num_computed_tokens=1,
                    block_ids=[8, 9],
                    sampling_params=sampling_pb2.SamplingParams(
                        temperature=0.5, seed=2**64 - 1, logit_bias={7: -1.5}
                    ).SerializeToString(),
                    pooling_params=pooling_pb2.Pooling(kind=pooling_pb2.POOLING_KIND_MEAN).SerializeToString(),
                    min_tokens=3,
                    stop_token_ids=[1, 2],
                    lora_id=6,
                )
            ],
            forks=[pb.Fork(parent_sequence_id=1, child_sequence_id=2, sequence_index=3, block_ids=[4])],
            sequence_ids=[10, 11],
            num_new_tokens=[1, 0],
            appended_sequence_ids=[10, 10],
            appended_block_ids=[12, 13],
            replaced_tables=[pb.BlockTable(sequence_id=11, block_ids=[14, 15])],
            blocks_to_swap_out=pb.BlockPairs(sources=[1, 2], destinations=[3, 4]),
            blocks_to_swap_in=pb.BlockPairs(sources=[5], destinations=[6]),
            blocks_to_copy=pb.BlockPairs(sources=[7], destinations=[8]),
            finished_sequence_ids=[20, 21],
            activated_lora_slots=[1, 0],
            activated_lora_ids=[6, 5],
        )
    )
    assert (step.epoch, step.step_id) == (3, 4)
    new = step.new_sequences[0]
    assert (new.sequence_id, new.sequence_index, new.prompt_length, new.num_computed_tokens) == (2**60, 1, 2, 1)
    assert (new.token_ids.tolist(), new.block_ids.tolist()) == ([5, 6, 7], [8, 9])
    assert (new.min_tokens, new.stop_token_ids) == (3, (1, 2))
    assert (new.sampling.temperature, new.sampling.seed, new.sampling.logit_bias) == (0.5, 2**64 - 1, {7: -1.5})
    assert (new.lora_id, new.pooling, new.rejection) == (6, Pooling(PoolingKind.MEAN), None)
    assert (step.activated_lora_slots.tolist(), step.activated_lora_ids.tolist()) == ([1, 0], [6, 5])
    fork = step.forks[0]
    assert (fork.parent_id, fork.child_id, fork.sequence_index, fork.block_ids.tolist()) == (1, 2, 3, [4])
    assert (step.sequence_ids, step.num_new_tokens.tolist()) == ((10, 11), [1, 0])
    assert (step.appended_sequence_ids, step.appended_block_ids.tolist()) == ((10, 10), [12, 13])
    assert [(i, table.tolist()) for i, table in step.replaced_tables] == [(11, [14, 15])]
    assert step.blocks_to_swap_out.pairs() == [(1, 3), (2, 4)]
    assert step.blocks_to_swap_in.pairs() == [(5, 6)]
    assert step.blocks_to_copy.pairs() == [(7, 8)]
    assert step.finished_sequence_ids == (20, 21)


def test_an_empty_step_has_empty_columns() -> None:
    step = codec.decode_step(pb.ExecuteModelRequest(epoch=1, step_id=1))
    assert step.num_new_tokens.dtype == step.appended_block_ids.dtype == np.int64
    assert len(step.blocks_to_copy) == 0


def test_absent_parameters_are_those_that_change_nothing() -> None:
    new = codec.decode_step(pb.ExecuteModelRequest(new_sequences=[pb.NewSequence(token_ids=[1])])).new_sequences[0]
    assert new.sampling == SamplingParams()
    zero = sampling_pb2.SamplingParams(temperature=0.0, top_p=0.5, repetition_penalty=1.5, min_p=0.25, top_k=3)
    new = codec.decode_step(
        pb.ExecuteModelRequest(new_sequences=[pb.NewSequence(sampling_params=zero.SerializeToString())])
    ).new_sequences[0]
    assert new.sampling == SamplingParams(temperature=0.0, top_p=0.5, repetition_penalty=1.5, min_p=0.25, top_k=3)


def test_whether_a_sequence_came_with_sampling_parameters_is_kept() -> None:
    for told, has_sampling in ((pb.NewSequence(), False), (pb.NewSequence(sampling_params=b""), True)):
        [new] = codec.decode_step(pb.ExecuteModelRequest(new_sequences=[told])).new_sequences
        assert new.has_sampling is has_sampling


LONG_SAMPLING = sampling_pb2.SamplingParams(bad_token_sequences=[sampling_pb2.TokenSequence()] * (2**14 + 1))


@pytest.mark.parametrize(
    ("told", "field"),
    [
        ({"sequence_ids": range(5)}, "sequence_ids: 5 entries, at most 4"),
        ({"num_new_tokens": [1] * 5}, "num_new_tokens: 5 entries, at most 4"),
        ({"input_sequence_ids": range(5)}, "input_sequence_ids: 5 entries, at most 4"),
        ({"new_sequences": [pb.NewSequence()] * 9}, "new_sequences: 9 entries, at most 8"),
        ({"forks": [pb.Fork()] * 9}, "forks: 9 entries, at most 8"),
        ({"replaced_tables": [pb.BlockTable()] * 9}, "replaced_tables: 9 entries, at most 8"),
        ({"finished_sequence_ids": range(2**20 + 1)}, "finished_sequence_ids: 1048577"),
    ],
)
def test_what_is_too_large_for_a_step_is_not_read(told: dict[str, Any], field: str) -> None:
    step = codec.decode_step(pb.ExecuteModelRequest(epoch=3, step_id=7, **told), max_num_seqs=4)
    assert (step.epoch, step.step_id, step.sequence_ids, step.new_sequences) == (3, 7, (), ())
    assert step.decode_error is not None
    assert step.decode_error.message.startswith(field)


def test_a_sequence_whose_sampling_is_too_large_is_not_read_and_fails_alone() -> None:
    told = [
        pb.NewSequence(sequence_id=3, sampling_params=LONG_SAMPLING.SerializeToString()),
        pb.NewSequence(sequence_id=4),
    ]
    long, other = codec.decode_step(pb.ExecuteModelRequest(new_sequences=told)).new_sequences
    assert long.rejection is not None
    assert long.rejection.message.startswith("sampling.bad_token_sequences: 16385")
    assert (long.sampling.bad_token_sequences, other.rejection) == ((), None)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"sampling_params": b"\xff\xff"}, "sampling: cannot be parsed"),
        ({"sampling_params": b"\x7a\x02\xff\xfe"}, "sampling: cannot be parsed"),
        ({"sampling_params": b"", "pooling_params": b"\x0a"}, "pooling: cannot be parsed"),
    ],
    ids=["no message", "a grammar that is no UTF-8", "a pooling that is cut off"],
)
def test_a_sequence_whose_bytes_are_no_message_fails_alone(told: dict[str, bytes], words: str) -> None:
    sequences = [pb.NewSequence(sequence_id=3, **told), pb.NewSequence(sequence_id=4, sampling_params=b"")]
    wrong, other = codec.decode_step(pb.ExecuteModelRequest(new_sequences=sequences)).new_sequences
    assert wrong.rejection is not None
    assert wrong.rejection.message.startswith(words)
    assert (wrong.sampling, wrong.pooling, other.rejection) == (SamplingParams(), None, None)


def test_an_answer_leaves_whole() -> None:
    failure = BlockyardError(Reason.BUG, "not finite")
    times = StepTimes(0.001, 0.002, 1.5, 0.004)
    message = codec.encode_result(StepOutput(3, 4, (10, 11), (5, 6), (12,), ((13, failure),), times=times))
    assert (message.epoch, message.step_id) == (3, 4)
    assert (message.sequence_ids, message.token_ids, message.skipped_sequence_ids) == ([10, 11], [5, 6], [12])
    assert message.failures[0].sequence_id == 13
    assert from_status(message.failures[0].status).message == "not finite"
    assert not message.HasField("refusal")
    nanoseconds = [
        getattr(message.times, n).ToNanoseconds() for n in ("queue", "cache_operations", "forward", "sample")
    ]
    assert nanoseconds == [10**6, 2 * 10**6, 15 * 10**8, 4 * 10**6]


def test_a_refusal_leaves_with_its_reason() -> None:
    refusal = BlockyardError(Reason.WRONG_STATE, "old", metadata={"epoch": "7"})
    error = from_status(codec.encode_result(StepOutput(1, 1, refusal=refusal)).refusal)
    assert (error.reason, error.message, error.metadata) == (Reason.WRONG_STATE, "old", {"epoch": "7"})


STEADY = {"epoch": 3, "step_id": 9, "sequence_ids": [4, 5], "num_new_tokens": [1, 1]}
MORE: dict[str, Any] = {
    "appended_sequence_ids": [4],
    "appended_block_ids": [7],
    "replaced_tables": [pb.BlockTable(sequence_id=4, block_ids=[1])],
    "blocks_to_swap_out": pb.BlockPairs(sources=[1], destinations=[2]),
    "blocks_to_swap_in": pb.BlockPairs(sources=[1], destinations=[2]),
    "blocks_to_copy": pb.BlockPairs(sources=[1], destinations=[2]),
    "finished_sequence_ids": [2],
    "input_sequence_ids": [4],
    "input_token_ids": [8],
    "forks": [pb.Fork(parent_sequence_id=4, child_sequence_id=6)],
    "new_sequences": [pb.NewSequence(sequence_id=5)],
}


@pytest.mark.parametrize("without", [None, *STEADY])
@pytest.mark.parametrize("field", [None, *MORE])
def test_a_steady_step_is_read_at_once_and_one_with_anything_more_whole(field: str | None, without: str | None) -> None:
    told = {**STEADY, **({field: MORE[field]} if field else {})}
    told.pop(without, None)
    step = codec.decode_step(pb.ExecuteModelRequest(**told))
    assert (step.epoch, step.step_id) == (told.get("epoch", 0), told.get("step_id", 0))
    assert step.sequence_ids == tuple(told.get("sequence_ids", ()))
    assert step.num_new_tokens.tolist() == told.get("num_new_tokens", [])
    read = {name for name in MORE if len(getattr(step, name))}
    assert read == ({field} if field else set())


@pytest.mark.parametrize("more", [{}, {"finished_sequence_ids": [4]}])
def test_what_a_rank_needs_of_a_step_arrives_with_whatever_else_it_has(more: dict[str, Any]) -> None:
    timeout = {"seconds": 2, "nanos": 500_000_000}
    told = pb.ExecuteModelRequest(epoch=1, step_id=2, sequence_ids=[3], num_new_tokens=[1], quiet=True, **more)
    assert codec.decode_step(told).timeout_seconds == DEFAULT_TIMEOUT_SECONDS
    told.MergeFrom(pb.ExecuteModelRequest(step_timeout=timeout))
    step = codec.decode_step(told)
    assert (step.quiet, step.timeout_seconds, step.sequence_ids) == (True, 2.5, (3,))
    assert step.finished_sequence_ids == tuple(more.get("finished_sequence_ids", ()))


def test_digests_leave_with_their_answer() -> None:
    message = codec.encode_result(StepOutput(1, 2, digests=(2**64 - 1, 3)))
    assert (message.input_digest, message.output_digest) == (2**64 - 1, 3)


def test_columns_that_are_empty_are_one_and_cannot_be_written() -> None:
    step = codec.decode_step(pb.ExecuteModelRequest(epoch=1, step_id=1, finished_sequence_ids=[1]))
    assert step.appended_block_ids is step.input_token_ids is step.blocks_to_copy.sources
    assert not step.appended_block_ids.flags.writeable


def test_times_leave_to_the_nanosecond() -> None:
    times = StepTimes(queue_seconds=1.5, cache_operations_seconds=0.0, forward_seconds=2e-9, sample_seconds=0.25)
    told = codec.encode_result(StepOutput(1, 2, times=times)).times
    assert (told.queue.ToNanoseconds(), told.sample.ToNanoseconds()) == (1_500_000_000, 250_000_000)
    assert told.forward.nanos == 2
    assert not told.HasField("cache_operations")
