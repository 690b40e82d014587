from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from blockyard.common.v1 import sampling_pb2
from blockyard.errors import BlockyardError, Reason, from_rpc_error
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from tests.kit.fakes.fake_scheduler import FakeScheduler, scripted
from tests.kit.refusals import refused
from tests.unit.gateway.harness import END_TOKEN, Front, demo_tokenizer, ids_of, rest_of, serving, spec

STOP, LENGTH = sampling_pb2.FINISH_REASON_STOP, sampling_pb2.FINISH_REASON_LENGTH


def texts(events: list[inference_pb2.GenerationEvent], index: int = 0) -> str:
    return "".join(e.delta.text for e in events if e.HasField("delta") and e.delta.index == index)


def finishes(events: list[inference_pb2.GenerationEvent]) -> dict[int, inference_pb2.Finished]:
    return {e.finished.index: e.finished for e in events if e.HasField("finished")}


async def test_a_stream_is_accepted_deltas_and_finished(front: Front) -> None:
    front.scheduler.script = scripted(*ids_of(" there was a cat."), END_TOKEN)
    events = await front.events(spec(request_id="one", max_tokens=50))
    assert [event.seq for event in events] == list(range(len(events)))
    assert events[0].accepted.request_id == "one"
    assert events[0].accepted.model == "demo"
    assert events[0].accepted.num_prompt_tokens == len(demo_tokenizer().encode("Once upon a time"))
    assert events[-1].HasField("finished")
    assert texts(events) == " there was a cat."
    finished = events[-1].finished
    assert finished.reason == STOP and not finished.HasField("matched_stop")
    assert finished.usage.num_completion_tokens == len(ids_of(" there was a cat.")) + 1
    assert finished.determinism_id == "fake"


async def test_positions_count_tokens_and_bytes(front: Front) -> None:
    text = "wörld 😀 and"
    front.scheduler.script = scripted(*ids_of(text))
    events = await front.events(spec(max_tokens=len(ids_of(text)), return_token_ids=True))
    num_tokens = num_bytes = 0
    for delta in (event.delta for event in events if event.HasField("delta")):
        num_tokens += len(delta.token_ids)
        num_bytes += len(delta.text.encode())
        assert (delta.num_tokens, delta.num_text_bytes) == (num_tokens, num_bytes)
    assert num_bytes == len(text.encode())
    assert [i for e in events for i in e.delta.token_ids] == ids_of(text)


async def test_token_ids_come_only_if_asked_for(front: Front) -> None:
    events = await front.events(spec())
    assert all(not event.delta.token_ids for event in events)


async def test_n_sequences_each_finish_once(front: Front) -> None:
    events = await front.events(spec(n=3, max_tokens=6, return_token_ids=True))
    assert sorted(finishes(events)) == [0, 1, 2]
    assert all(finished.reason == LENGTH for finished in finishes(events).values())
    for index in range(3):
        token_ids = [i for e in events if e.delta.index == index for i in e.delta.token_ids]
        assert texts(events, index) == demo_tokenizer().decode(token_ids)
    assert len({texts(events, index) for index in range(3)}) == 3


async def test_the_whole_answer_is_the_stream_joined(front: Front) -> None:
    request = spec(n=2, max_tokens=9, return_token_ids=True, sampling={"seed": 5})
    events = await front.events(request)
    answer = await front.generate(request)
    assert answer.accepted.seed == 5
    for index, choice in enumerate(answer.choices):
        assert choice.index == index
        assert choice.text == texts(events, index)
        assert choice.finished == finishes(events)[index]


async def test_a_stop_string_ends_the_text_and_the_sequence(front: Front) -> None:
    front.scheduler.script = scripted(*ids_of("one two three. four five six"))
    events = await front.events(spec(max_tokens=500, stop={"stop_strings": [". f"]}))
    finished = events[-1].finished
    assert texts(events) == "one two three"
    assert finished.reason == STOP and finished.matched_stop.stop_string == ". f"
    await front.scheduler.wait_until(lambda: bool(front.scheduler.aborted))
    abort = front.scheduler.aborted[0]
    assert abort.sequence_index == 0
    assert abort.num_tokens == finished.usage.num_completion_tokens
    # Of the ids none is taken back: the one that completed the stop string is the last.
    assert (
        demo_tokenizer()
        .decode(ids_of("one two three. four five six")[: abort.num_tokens])
        .startswith("one two three. f")
    )


async def test_a_stop_token_of_the_request_is_told(front: Front) -> None:
    front.scheduler.script = scripted(20, 21, 22, 23)
    events = await front.events(spec(max_tokens=50, return_token_ids=True, stop={"stop_token_ids": [22]}))
    finished = events[-1].finished
    assert finished.matched_stop.stop_token_id == 22
    assert [i for e in events for i in e.delta.token_ids] == [20, 21, 22]
    assert texts(events) == demo_tokenizer().decode([20, 21])


async def test_ignoring_the_end_sends_no_end_tokens(front: Front) -> None:
    front.scheduler.script = scripted(20, END_TOKEN, 21)
    events = await front.events(spec(max_tokens=3, stop={"ignore_eos": True}))
    assert front.scheduler.added[0].stop_token_ids == ()
    assert events[-1].finished.reason == LENGTH


async def test_all_violations_are_told_at_once(front: Front) -> None:
    error = await refused(front.generate(spec("", request_id="?", n=65, sampling={"top_p": 2.0}, max_tokens=0)))
    assert error.reason is Reason.FIELD_INVALID
    assert {violation.field for violation in error.violations} == {
        "request_id",
        "prompt",
        "n",
        "sampling.top_p",
        "stop.max_tokens",
    }


async def test_a_stream_is_refused_like_a_call(front: Front) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await front.events(spec(model="other"))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert from_rpc_error(raised.value).reason is Reason.MODEL_NOT_FOUND


async def test_what_the_scheduler_refuses_is_told_as_it_says(front: Front) -> None:
    front.scheduler.refusals["big"] = BlockyardError(Reason.NEVER_FITS, "64 tokens fit")
    error = await refused(front.generate(spec(request_id="big")))
    assert (error.reason, error.message) == (Reason.NEVER_FITS, "64 tokens fit")


async def test_a_request_may_fail_in_the_middle(front: Front) -> None:
    front.scheduler.pause()
    call = front.stream(spec(request_id="poor", max_tokens=100))
    assert (await call.read()).event.HasField("accepted")
    await front.scheduler.fail("poor", BlockyardError(Reason.BUG, "oh"))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        while await call.read():
            pass
    assert from_rpc_error(raised.value).reason is Reason.BUG


async def test_an_id_is_that_of_one_request_while_it_runs_and_a_minute_after(front: Front) -> None:
    front.scheduler.pause()
    call = front.stream(spec(request_id="mine", max_tokens=3))
    await call.read()
    other = spec(request_id="mine", max_tokens=4)
    assert (await refused(front.generate(other))).reason is Reason.REQUEST_ID_CONFLICT
    front.scheduler.go_on()
    assert (await rest_of(call))[-1].HasField("finished")
    assert (await refused(front.generate(other))).reason is Reason.REQUEST_ID_CONFLICT


async def test_cancel_ends_streams_with_cancelled(front: Front) -> None:
    front.scheduler.pause()
    call = front.stream(spec(request_id="mine", max_tokens=100))
    await call.read()
    response = await front.stub.CancelGenerate(
        inference_pb2.CancelGenerateRequest(request_ids=["mine", "unknown", "mine"])
    )
    assert response.cancelled_request_ids == ["mine"]
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert raised.value.code() is grpc.StatusCode.CANCELLED
    assert from_rpc_error(raised.value).reason is Reason.CLIENT_CANCELLED
    await front.scheduler.wait_until(lambda: [abort.request_id for abort in front.scheduler.aborted] == ["mine"])
    again = await front.stub.CancelGenerate(inference_pb2.CancelGenerateRequest(request_ids=["mine"]))
    assert again.cancelled_request_ids == []


async def test_a_cancelled_stream_is_aborted(front: Front) -> None:
    front.scheduler.pause()
    call = front.stream(spec(request_id="gone", max_tokens=100))
    await call.read()
    call.cancel()
    await front.scheduler.wait_until(lambda: [abort.request_id for abort in front.scheduler.aborted] == ["gone"])
    assert front.scheduler.num_sequences == 0


async def test_a_cancelled_call_is_aborted(front: Front) -> None:
    front.scheduler.pause()
    call = front.stub.Generate(inference_pb2.GenerateRequest(spec=spec(request_id="gone", max_tokens=100)))
    await front.scheduler.wait_until(lambda: bool(front.scheduler.added))
    call.cancel()
    await front.scheduler.wait_until(lambda: [abort.request_id for abort in front.scheduler.aborted] == ["gone"])


async def test_a_lost_connection_is_aborted(front: Front) -> None:
    front.scheduler.pause()
    channel = grpc.aio.insecure_channel(front.address, [("grpc.use_local_subchannel_pool", 1)])
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    call = stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec(request_id="gone", max_tokens=100)))
    await call.read()
    await channel.close()
    await front.scheduler.wait_until(lambda: [abort.request_id for abort in front.scheduler.aborted] == ["gone"])


async def test_a_client_that_leaves_while_tokens_flow_is_aborted() -> None:
    # No answer ends before its client has left.
    async with FakeScheduler(max_model_len=10**9) as scheduler, serving(scheduler) as front:
        calls = [front.stream(spec(request_id=f"r{i}", max_tokens=10**8)) for i in range(8)]
        for call in calls:
            await call.read()
            await call.read()
            call.cancel()
        await scheduler.wait_until(
            lambda: {abort.request_id for abort in scheduler.aborted} == {f"r{i}" for i in range(8)}
        )


async def test_a_deadline_is_an_abort(front: Front) -> None:
    front.scheduler.pause()
    call = front.stub.Generate(inference_pb2.GenerateRequest(spec=spec(request_id="late")), timeout=0.2)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await front.scheduler.wait_until(lambda: [abort.request_id for abort in front.scheduler.aborted] == ["late"])


async def test_a_slow_client_gets_the_whole_text_in_fewer_deltas(front: Front) -> None:
    front.scheduler.pause()
    # A client whose window is small: the transport takes no more than it reads.
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(front.address, options) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = spec(request_id="slow", max_tokens=1000, return_token_ids=True)
        call = stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=request))
        assert (await call.read()).event.HasField("accepted")
        for _ in range(1000):
            await front.scheduler.step()
        events = await rest_of(call)
    token_ids = [i for event in events for i in event.delta.token_ids]
    assert len(token_ids) == 1000
    assert len(events) < 500
    assert texts(events) == demo_tokenizer().decode(token_ids)


async def test_tokenize_and_detokenize(front: Front) -> None:
    tokenizer = demo_tokenizer()
    text = "Hi wörld"
    answer = await front.stub.Tokenize(inference_pb2.TokenizeRequest(text=text))
    assert answer.token_ids == tokenizer.encode(text)
    bare = await front.stub.Tokenize(inference_pb2.TokenizeRequest(text=text, add_special_tokens=False))
    assert [END_TOKEN, *bare.token_ids] == list(answer.token_ids)
    back = await front.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=answer.token_ids))
    assert back.text == text
    full = await front.stub.Detokenize(
        inference_pb2.DetokenizeRequest(token_ids=answer.token_ids, skip_special_tokens=False)
    )
    assert full.text == "<|endoftext|>" + text
    assert (await refused(front.stub.Tokenize(inference_pb2.TokenizeRequest(model="x")))).code is (
        grpc.StatusCode.NOT_FOUND
    )


async def test_models_are_listed(front: Front) -> None:
    (model,) = (await front.stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert (model.name, model.max_model_len, model.vocab_size) == ("demo", 1024, 4096)
    assert model.has_chat_template and model.batch_invariant and model.determinism_id == "fake"


async def test_a_long_prompt_is_tokenized_like_a_short_one(front: Front) -> None:
    text = "the cat sat on the mat. " * 120
    answer = await front.stub.Tokenize(inference_pb2.TokenizeRequest(text=text))
    assert answer.token_ids == demo_tokenizer().encode(text)


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate", "Tokenize"])
async def test_broken_utf8_is_the_clients_fault(front: Front, method: str) -> None:
    # GenerationSpec.request_id, or TokenizeRequest.model, with a byte that begins nothing.
    content = b"\x0a\x01\xff" if method == "Tokenize" else b"\x0a\x03\x0a\x01\xff"
    path = f"/blockyard.inference.v1.InferenceService/{method}"
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        if method == "StreamGenerate":
            await front.channel.unary_stream(path)(content).read()
        else:
            await front.channel.unary_unary(path)(content)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "UTF-8" in from_rpc_error(raised.value).message


async def test_an_oversize_message_is_resource_exhausted(front: Front) -> None:
    request = inference_pb2.TokenizeRequest(text="a" * (16 * 1024 * 1024 + 1))
    error = await refused(front.stub.Tokenize(request))
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.MESSAGE_TOO_LARGE)


async def test_streams_of_many_clients_do_not_mix(front: Front) -> None:
    requests = [spec(request_id=f"r{i}", max_tokens=40, return_token_ids=True) for i in range(32)]
    answers = await asyncio.gather(*(front.events(request) for request in requests))
    for events in answers:
        seed = events[0].accepted.seed
        expected = [5 + (seed + 104729 * (position + 1)) % 4000 for position in range(40)]
        assert [i for event in events for i in event.delta.token_ids] == expected
        assert texts(events) == demo_tokenizer().decode(expected)


async def test_a_question_does_not_stand_behind_hundreds_of_new_requests(front: Front) -> None:
    """A loop takes one call of a method in a few turns."""
    front.scheduler.pause()
    num_streams = 400
    calls = [front.stream(spec(max_tokens=1)) for _ in range(num_streams)]
    begun = asyncio.gather(*(call.read() for call in calls))
    assert (await front.stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert front.live.num_running < num_streams / 2
    await begun
    front.scheduler.go_on()
    for call in calls:
        assert finishes(await rest_of(call))
