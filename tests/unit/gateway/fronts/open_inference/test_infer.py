from __future__ import annotations

import asyncio
import json
import math

import grpc
import grpc.aio
import pytest

from blockyard.errors import BlockyardError, Reason
from blockyard.inference.v1 import inference_pb2
from tests.kit.fakes.fake_scheduler import FakeScheduler, scripted
from tests.kit.refusals import refused
from tests.unit.gateway.fronts.open_inference.harness import (
    PROMPT,
    InferenceFront,
    infer,
    is_final,
    serving_inference,
    tensors,
)
from tests.unit.gateway.harness import END_TOKEN, demo_tokenizer, ids_of, spec

TEXT = " there was a wörld 😀."


async def test_an_answer_is_the_text_behind_its_prompt(front: InferenceFront) -> None:
    front.scheduler.script = scripted(*ids_of(TEXT), END_TOKEN)
    response = await front.stub.ModelInfer(infer(PROMPT, sampling={"max_tokens": 50}, fields={"id": "mine"}))
    assert (response.model_name, response.model_version, response.id) == ("demo", "1", "mine")
    assert is_final(response)
    assert tensors(response) == {"text_output": [(PROMPT + TEXT).encode()]}
    assert front.scheduler.added[0].request_id == "mine"


@pytest.mark.parametrize("raw", [False, True])
async def test_tensors_come_back_as_they_were_sent(front: InferenceFront, raw: bool) -> None:
    front.scheduler.script = scripted(*ids_of(TEXT), END_TOKEN)
    request = infer(
        PROMPT,
        raw=raw,
        sampling={"max_tokens": 50},
        exclude_input_in_output=True,
        return_finish_reason=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    response = await front.stub.ModelInfer(request)
    assert bool(response.raw_output_contents) is raw
    assert tensors(response) == {
        "text_output": [TEXT.encode()],
        "finish_reason": [b"stop"],
        "num_input_tokens": [len(demo_tokenizer().encode(PROMPT))],
        "num_output_tokens": [len(ids_of(TEXT)) + 1],
    }


async def test_prompts_run_side_by_side_and_have_their_choices_in_order(front: InferenceFront) -> None:
    sampling = {"max_tokens": 4, "n": 2, "seed": 3}
    flags = {"exclude_input_in_output": True, "return_num_input_tokens": True, "return_finish_reason": True}
    front.scheduler.pause()
    asked = asyncio.create_task(front.infer("one", "two of them", "three", sampling=sampling, **flags))
    await front.scheduler.wait_until(lambda: front.scheduler.num_sequences == 6)
    front.scheduler.go_on()
    told = await asked
    assert told["finish_reason"] == [b"length"] * 6
    assert told["num_input_tokens"] == [len(demo_tokenizer().encode(p)) for p in ("one", "two of them", "three")]
    for number, prompt in enumerate(("one", "two of them", "three")):
        alone = await front.gateway.generate(spec(prompt, max_tokens=4, n=2, sampling={"seed": 3}))
        assert told["text_output"][2 * number : 2 * number + 2] == [choice.text.encode() for choice in alone.choices]


async def test_a_prompt_is_before_each_of_its_choices(front: InferenceFront) -> None:
    told = await front.infer("one ", "two ", sampling={"max_tokens": 2, "n": 2})
    assert [text[:4] for text in told["text_output"]] == [b"one ", b"one ", b"two ", b"two "]


async def test_log_probabilities_have_the_form_of_triton(front: InferenceFront) -> None:
    whole = await front.gateway.generate(spec(PROMPT, max_tokens=3, sampling={"seed": 5, "logprobs": 2}))
    flags = {"return_logprobs": True, "return_cumulative_logprob": True}
    told = await front.infer(PROMPT, sampling={"max_tokens": 3, "seed": 5, "logprobs": 2}, **flags)
    entries = json.loads(told["logprobs"][0])
    places = whole.choices[0].logprobs
    assert len(entries) == len(places) == 3
    for entry, place in zip(entries, places, strict=True):
        known = {str(token.token_id): token for token in (place.chosen, *place.top)}
        assert entry.keys() == known.keys()
        for name, token in known.items():
            assert entry[name]["decoded_token"] == token.text and entry[name]["rank"] == token.rank
            assert math.isclose(entry[name]["logprob"], token.logprob, rel_tol=1e-5)
    total = sum(place.chosen.logprob for place in places)
    assert math.isclose(told["cumulative_logprob"][0], total, rel_tol=1e-5)


async def test_the_default_length_gives_way_to_the_length_of_the_model() -> None:
    async with FakeScheduler(max_model_len=12) as scheduler, serving_inference(scheduler) as front:
        num_prompt_tokens = len(demo_tokenizer().encode(PROMPT))
        told = await front.infer(PROMPT, return_num_output_tokens=True)
        assert told["num_output_tokens"] == [12 - num_prompt_tokens]
        error = await refused(front.stub.ModelInfer(infer(PROMPT, sampling={"max_tokens": 12})))
        assert [violation.field for violation in error.violations] == ["max_tokens"]


async def test_values_are_refused_by_their_names_here(front: InferenceFront) -> None:
    sampling = {"top_p": 2, "max_tokens": 0, "n": 65, "stop": [""]}
    request = infer("", sampling=sampling, fields={"id": "?", "model_name": "other"})
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await front.stub.ModelInfer(request)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    error = await refused(front.stub.ModelInfer(request))
    assert {violation.field for violation in error.violations} == {
        "model_name",
        "id",
        "text_input",
        "top_p",
        "max_tokens",
        "n",
        "stop",
    }


async def test_a_beam_search_tells_its_texts_and_no_log_probabilities(front: InferenceFront) -> None:
    sampling = {"use_beam_search": True, "best_of": 4, "n": 2, "max_tokens": 3}
    error = await refused(front.stub.ModelInfer(infer(PROMPT, sampling=sampling, return_logprobs=True)))
    assert error.reason is Reason.UNSUPPORTED_PARAMETER
    assert [violation.field for violation in error.violations] == ["logprobs"]


async def test_streams_are_for_the_streaming_call(front: InferenceFront) -> None:
    error = await refused(front.stub.ModelInfer(infer(PROMPT, stream=True)))
    assert [violation.field for violation in error.violations] == ["stream"]
    assert "ModelStreamInfer" in error.message


async def test_what_the_scheduler_refuses_is_told_as_it_says(front: InferenceFront) -> None:
    front.scheduler.refusals["big"] = BlockyardError(Reason.QUEUE_FULL, "come back", retry_after_seconds=2.0)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await front.stub.ModelInfer(infer(PROMPT, fields={"id": "big"}))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = await refused(front.stub.ModelInfer(infer(PROMPT, fields={"id": "big"})))
    assert (error.reason, error.retry_after_seconds) == (Reason.QUEUE_FULL, 2.0)


async def test_of_several_prompts_one_that_fails_fails_all(front: InferenceFront) -> None:
    front.scheduler.pause()
    asked = asyncio.create_task(refused(front.stub.ModelInfer(infer("a", "b", "c", fields={"id": "x"}))))
    await front.scheduler.wait_until(lambda: front.scheduler.num_sequences == 3)
    await front.scheduler.fail("x-1", BlockyardError(Reason.POISON_REQUEST, "oh"))
    assert (await asked).reason is Reason.POISON_REQUEST
    await front.scheduler.wait_until(lambda: not front.scheduler.live)


async def test_an_id_names_the_request(front: InferenceFront) -> None:
    first = await front.infer("a", fields={"id": "mine"})
    assert await front.infer("a", fields={"id": "mine"}) == first
    assert len(front.scheduler.added) == 1
    error = await refused(front.stub.ModelInfer(infer("b", fields={"id": "mine"})))
    assert error.reason is Reason.REQUEST_ID_CONFLICT


async def test_a_cancelled_call_aborts_its_requests(front: InferenceFront) -> None:
    front.scheduler.pause()
    call = front.stub.ModelInfer(infer("a", "b", fields={"id": "gone"}))
    asked = asyncio.ensure_future(call)
    await front.scheduler.wait_until(lambda: front.scheduler.num_sequences == 2)
    call.cancel()
    await front.scheduler.wait_until(lambda: not front.scheduler.live)
    assert {abort.request_id for abort in front.scheduler.aborted} == {"gone-0", "gone-1"}
    with pytest.raises(asyncio.CancelledError):
        await asked


async def test_a_request_ends_by_its_name_too(front: InferenceFront) -> None:
    front.scheduler.pause()
    asked = asyncio.create_task(refused(front.stub.ModelInfer(infer("a", fields={"id": "mine"}))))
    await front.scheduler.wait_until(lambda: "mine" in front.scheduler.live)
    await front.gateway.stub.CancelGenerate(inference_pb2.CancelGenerateRequest(request_ids=["mine"]))
    assert (await asked).reason is Reason.CLIENT_CANCELLED


async def test_tenant_and_deadlines_reach_the_scheduler(front: InferenceFront) -> None:
    request = infer(PROMPT, parameters={"timeout": 60_000_000, "priority": 4})
    await front.stub.ModelInfer(request, metadata=[("x-blockyard-tenant", "team")], timeout=600)
    await front.stub.ModelInfer(infer(PROMPT), timeout=600)
    first, second = front.scheduler.added
    assert (first.tenant, first.priority) == ("team", 4)
    assert 0 < (first.remaining_seconds or 0) <= 60 < (second.remaining_seconds or 0) < 601


async def test_a_wrong_tenant_is_refused(front: InferenceFront) -> None:
    error = await refused(front.stub.ModelInfer(infer(PROMPT), metadata=[("x-blockyard-tenant", "a/b")]))
    assert error.reason is Reason.FIELD_INVALID


async def test_what_is_no_message_is_the_fault_of_the_client(front: InferenceFront) -> None:
    call = front.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    # The field `id`, which is not UTF-8.
    error = await refused(call(b"\x1a\x01\xff"))
    assert error.reason is Reason.FIELD_INVALID
