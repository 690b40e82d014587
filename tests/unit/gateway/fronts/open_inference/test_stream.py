from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from blockyard.errors import BlockyardError, Reason, from_rpc_error
from blockyard.open_inference.v2 import open_inference_pb2 as messages
from tests.kit.fakes.fake_scheduler import scripted
from tests.unit.gateway.fronts.open_inference.harness import PROMPT, InferenceFront, infer, is_final, tensors
from tests.unit.gateway.harness import END_TOKEN, demo_tokenizer, ids_of, spec

TEXT = " there was a wörld 😀."


async def answers(front: InferenceFront, *requests: Any, **options: Any) -> list[messages.ModelStreamInferResponse]:
    """Sends requests, half-closes, and reads the stream to its end."""
    return [response async for response in front.stub.ModelStreamInfer(iter(requests), **options)]


def of_request(responses: list[messages.ModelStreamInferResponse], name: str) -> list[messages.ModelInferResponse]:
    """The responses to one request, which did not fail."""
    told = [response.infer_response for response in responses if response.infer_response.id == name]
    assert not any(response.error_message for response in responses if response.infer_response.id == name)
    return told


def texts(responses: list[messages.ModelInferResponse], index: int = 0) -> str:
    return b"".join(tensors(response)["text_output"][index] for response in responses).decode()


async def test_a_streamed_answer_is_the_whole_one_in_pieces(front: InferenceFront) -> None:
    front.scheduler.script = scripted(*ids_of(TEXT), END_TOKEN)
    request = infer(
        PROMPT,
        sampling={"max_tokens": 50},
        stream=True,
        fields={"id": "mine"},
        return_finish_reason=True,
        return_num_output_tokens=True,
        return_num_input_tokens=True,
    )
    responses = of_request(await answers(front, request), "mine")
    assert texts(responses) == TEXT
    assert [is_final(response) for response in responses] == [False] * (len(responses) - 1) + [True]
    told = [tensors(response) for response in responses]
    assert [piece["finish_reason"] for piece in told] == [[b"None"]] * (len(told) - 1) + [[b"stop"]]
    assert sum(piece["num_output_tokens"][0] for piece in told) == len(ids_of(TEXT)) + 1
    assert {piece["num_input_tokens"][0] for piece in told} == {len(demo_tokenizer().encode(PROMPT))}


async def test_tokens_come_one_by_one(front: InferenceFront) -> None:
    front.scheduler.pause()
    front.scheduler.script = scripted(*ids_of(" one two three"))
    call = front.stub.ModelStreamInfer()
    await call.write(infer(PROMPT, sampling={"max_tokens": 3}, stream=True))
    await front.scheduler.wait_until(lambda: front.scheduler.num_sequences == 1)
    for word in (" one", " two", " three"):
        await front.scheduler.step()
        assert tensors((await call.read()).infer_response)["text_output"] == [word.encode()]
    assert is_final((await call.read()).infer_response)
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_each_piece_has_an_element_for_each_choice(front: InferenceFront) -> None:
    sampling = {"max_tokens": 5, "n": 3, "seed": 4}
    responses = of_request(await answers(front, infer(PROMPT, sampling=sampling, stream=True)), "")
    alone = await front.gateway.generate(spec(PROMPT, max_tokens=5, n=3, sampling={"seed": 4}))
    assert [texts(responses, index) for index in range(3)] == [choice.text for choice in alone.choices]
    assert sum(map(is_final, responses)) == 1 and is_final(responses[-1])


async def test_log_probabilities_add_up_over_the_pieces(front: InferenceFront) -> None:
    sampling = {"max_tokens": 5, "seed": 4}
    flags = {"return_logprobs": True, "return_cumulative_logprob": True}
    whole = await front.infer(PROMPT, sampling=sampling, **flags)
    pieces = [
        tensors(r) for r in of_request(await answers(front, infer(PROMPT, sampling=sampling, stream=True, **flags)), "")
    ]
    assert pieces[-1]["cumulative_logprob"] == whole["cumulative_logprob"]
    joined = b", ".join(p["logprobs"][0][1:-1] for p in pieces if p["logprobs"][0] != b"[]")
    assert b"[" + joined + b"]" == whole["logprobs"][0]


async def test_without_stream_an_answer_comes_at_once(front: InferenceFront) -> None:
    request = infer("a", "b", sampling={"max_tokens": 5, "seed": 1}, fields={"id": "both"})
    (response,) = of_request(await answers(front, request), "both")
    assert is_final(response)
    assert tensors(response) == await front.infer("a", "b", sampling={"max_tokens": 5, "seed": 1})


async def test_requests_of_a_stream_run_side_by_side(front: InferenceFront) -> None:
    front.scheduler.pause()
    names = [f"r{number}" for number in range(20)]
    requests = [
        infer(PROMPT, sampling={"max_tokens": 4, "seed": 2}, stream=bool(number % 2), fields={"id": name})
        for number, name in enumerate(names)
    ]
    reading = asyncio.create_task(answers(front, *requests))
    await front.scheduler.wait_until(lambda: front.scheduler.num_sequences == 20)
    front.scheduler.go_on()
    responses = await reading
    told = {name: texts(of_request(responses, name)).removeprefix(PROMPT) for name in names}
    assert len(set(told.values())) == 1 and told["r0"]


async def test_a_request_that_fails_does_not_end_the_stream(front: InferenceFront) -> None:
    front.scheduler.refusals["refused"] = BlockyardError(Reason.NEVER_FITS, "64 tokens fit")
    responses = await answers(
        front,
        infer(PROMPT, sampling={"top_p": 2}, fields={"id": "wrong"}),
        infer(PROMPT, sampling={"max_tokens": "many"}, fields={"id": "wronger"}),
        infer(PROMPT, fields={"id": "refused"}),
        infer(PROMPT, fields={"id": "right"}),
    )
    failed = {r.infer_response.id: r.error_message for r in responses if r.error_message}
    assert failed.keys() == {"wrong", "wronger", "refused"}
    assert failed["wrong"].startswith("FIELD_INVALID: top_p: must be above 0")
    assert failed["wronger"].startswith("FIELD_INVALID: max_tokens: ")
    assert failed["refused"] == "NEVER_FITS: 64 tokens fit"
    assert texts(of_request(responses, "right")).startswith(PROMPT)
    told = dict(front.gateway.live.metrics.errors.samples())
    assert (told["grpc", "FIELD_INVALID"], told["grpc", "NEVER_FITS"]) == (2, 1)


async def test_a_request_may_fail_in_the_middle(front: InferenceFront) -> None:
    front.scheduler.pause()
    call = front.stub.ModelStreamInfer()
    await call.write(infer(PROMPT, sampling={"max_tokens": 100}, stream=True, fields={"id": "poor"}))
    await front.scheduler.wait_until(lambda: front.scheduler.num_sequences == 1)
    await front.scheduler.step()
    assert not (await call.read()).error_message
    await front.scheduler.fail("poor", BlockyardError(Reason.POISON_REQUEST, "oh"))
    assert (await call.read()).error_message == "POISON_REQUEST: oh"
    front.scheduler.go_on()
    await call.write(infer(PROMPT, fields={"id": "next"}))
    assert (await call.read()).infer_response.id == "next"
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_a_client_may_ask_for_a_status_instead(front: InferenceFront) -> None:
    front.scheduler.pause()
    call = front.stub.ModelStreamInfer(metadata=[("triton_grpc_error", "true")])
    await call.write(infer(PROMPT, stream=True))
    await front.scheduler.wait_until(lambda: front.scheduler.num_sequences == 1)
    await call.write(infer(PROMPT, sampling={"top_p": 2}))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in from_rpc_error(raised.value).violations] == ["top_p"]
    await front.scheduler.wait_until(lambda: not front.scheduler.live)


@pytest.mark.parametrize("leave", ["cancel", "close"])
async def test_a_stream_that_is_left_aborts_its_requests(
    front: InferenceFront, leave: str, caplog: pytest.LogCaptureFixture
) -> None:
    front.scheduler.pause()
    call = front.stub.ModelStreamInfer()
    for number in range(3):
        await call.write(infer(PROMPT, sampling={"max_tokens": 900}, stream=True, fields={"id": f"r{number}"}))
    await call.write(infer("a", "b", fields={"id": "whole"}))
    await front.scheduler.wait_until(lambda: front.scheduler.num_sequences == 5)
    front.scheduler.go_on()
    await call.read()
    if leave == "cancel":
        call.cancel()
    else:
        await front.channel.close()
    await front.scheduler.wait_until(lambda: not front.scheduler.live)
    await front.gateway.wait_until_unread()
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


async def test_what_a_slow_reader_has_not_read_merges(front: InferenceFront) -> None:
    front.scheduler.pause()
    call = front.stub.ModelStreamInfer()
    await call.write(infer(PROMPT, sampling={"max_tokens": 1000, "seed": 1, "n": 16}, stream=True))
    await call.done_writing()
    await front.scheduler.wait_until(lambda: front.scheduler.num_sequences == 16)
    await front.scheduler.step(1000)
    responses = [response.infer_response async for response in call]
    assert len(responses) < 16 * 1000 / 2
    front.scheduler.go_on()
    alone = await front.gateway.generate(spec(PROMPT, max_tokens=1000, n=16, sampling={"seed": 1}))
    assert [texts(responses, index) for index in range(16)] == [choice.text for choice in alone.choices]


async def test_what_is_no_message_is_told_and_the_stream_goes_on(front: InferenceFront) -> None:
    call = front.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    right = infer(PROMPT, fields={"id": "right"}).SerializeToString()
    told = [messages.ModelStreamInferResponse.FromString(c) async for c in call(iter([b"\x1a\x01\xff", right]))]
    assert sorted(bool(response.error_message) for response in told) == [False, True]


async def test_a_fault_of_ours_is_told_as_one(front: InferenceFront, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr("gateway.fronts.open_inference.servicer.understand", broken)
    (response,) = await answers(front, infer(PROMPT, fields={"id": "mine"}))
    assert response.error_message.startswith("BUG: internal error") and "secret" not in response.error_message
    assert response.infer_response.id == "mine"


async def test_no_more_requests_are_read_than_run(front: InferenceFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.fronts.open_inference.servicer.MAX_REQUESTS_OF_STREAM", 2)
    front.scheduler.pause()
    requests = [infer(PROMPT, sampling={"max_tokens": 2}, fields={"id": f"r{number}"}) for number in range(6)]
    reading = asyncio.create_task(answers(front, *requests))
    for num_added in (2, 4, 6):
        await front.scheduler.wait_until(lambda expected=num_added: len(front.scheduler.added) == expected)
        assert front.scheduler.num_sequences == 2
        await front.scheduler.step(2)
    assert len(await reading) == 6


async def test_a_stream_outlives_the_scheduler(front: InferenceFront) -> None:
    front.scheduler.pause()
    front.scheduler.script = scripted(*ids_of(TEXT), END_TOKEN)
    call = front.stub.ModelStreamInfer()
    await call.write(infer(PROMPT, sampling={"max_tokens": 50}, stream=True))
    await front.scheduler.wait_until(lambda: front.scheduler.num_sequences == 1)
    await front.scheduler.step(2)
    told = [(await call.read()).infer_response]
    await front.scheduler.restart()
    front.scheduler.go_on()
    await call.done_writing()
    while not is_final(told[-1]):
        told.append((await call.read()).infer_response)
    assert texts(told) == TEXT
    assert await call.read() is grpc.aio.EOF


NOT_A_NUMBER = BlockyardError(Reason.NOT_FINITE, "no numbers")
TWO = {"max_tokens": 4, "n": 2, "seed": 3}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_fails_is_told_beside_the_others(front: InferenceFront, stream: bool) -> None:
    front.scheduler.failing["r", 1] = NOT_A_NUMBER
    request = infer(PROMPT, sampling=TWO, fields={"id": "r"}, return_finish_reason=True)
    if stream:
        call = front.stub.ModelStreamInfer()
        await call.write(request)
        await call.done_writing()
        answered = [message async for message in call]
        assert not any(message.error_message for message in answered)
        last = answered[-1].infer_response
    else:
        last = await front.stub.ModelInfer(request)
    assert is_final(last)
    assert tensors(last)["finish_reason"] == [b"length", b"error"]
    assert last.parameters["error_1"].string_param == "NOT_FINITE: no numbers"
    assert "error_0" not in last.parameters


async def test_a_request_of_which_all_fails_fails(front: InferenceFront) -> None:
    for index in range(2):
        front.scheduler.failing["whole", index] = front.scheduler.failing["piecewise", index] = NOT_A_NUMBER
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await front.stub.ModelInfer(infer(PROMPT, sampling=TWO, fields={"id": "whole"}))
    assert from_rpc_error(raised.value) == NOT_A_NUMBER
    call = front.stub.ModelStreamInfer()
    await call.write(infer(PROMPT, sampling=TWO, fields={"id": "piecewise"}))
    await call.done_writing()
    answered = [message async for message in call]
    assert [message.error_message for message in answered if message.error_message] == ["NOT_FINITE: no numbers"]
    assert answered[-1].error_message
    assert not any(is_final(message.infer_response) for message in answered[:-1])
