"""Log probabilities on their way to clients: each token's once, whoever dies or reads again meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from blockyard.inference.v1 import inference_pb2
from tests.kit.fakes.fake_requests import logprobs_of
from tests.kit.fakes.fake_scheduler import FakeScheduler, scripted
from tests.unit.gateway.harness import demo_tokenizer, ids_of, rest_of, serving, spec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Event = inference_pb2.GenerationEvent

PROMPT = "Once upon a time"
ASKED: Any = {"sampling": {"seed": 3, "logprobs": 1, "prompt_logprobs": 1}, "return_token_ids": True}
TEXTS = demo_tokenizer().token_texts()


def expected(token_ids: Iterable[int]) -> list[inference_pb2.TokenLogprobs]:
    """What the fake scheduler tells of these tokens, with their texts."""
    told: list[inference_pb2.TokenLogprobs] = []
    for token_id in token_ids:
        (chosen, other), values = (token_id, 7), logprobs_of([token_id]).logprobs
        first = inference_pb2.TokenLogprob(token_id=chosen, text=TEXTS.of(chosen)[0], logprob=values[0], rank=2)
        best = inference_pb2.TokenLogprob(token_id=other, text=TEXTS.of(other)[0], logprob=values[1], rank=1)
        told.append(inference_pb2.TokenLogprobs(chosen=first, top=[best]))
    return told


def kinds(events: Sequence[Event]) -> list[str | None]:
    return [event.WhichOneof("event") for event in events]


def of_prompt(events: Sequence[Event]) -> list[inference_pb2.TokenLogprobs]:
    [event] = [event for event in events if event.HasField("prompt_logprobs")]
    return list(event.prompt_logprobs.logprobs)


def check_deltas(events: Sequence[Event], *, n: int = 1, num_known: int = 0) -> list[list[int]]:
    """Holds every delta's log probabilities against its tokens, which are returned by sequence."""
    token_ids: list[list[int]] = [[] for _ in range(n)]
    for event in events:
        if event.HasField("delta"):
            assert list(event.delta.logprobs) == expected(event.delta.token_ids)
            token_ids[event.delta.index].extend(event.delta.token_ids)
            assert event.delta.num_tokens == num_known + len(token_ids[event.delta.index])
    return token_ids


async def test_those_of_the_prompt_come_once_and_before_all_deltas() -> None:
    async with FakeScheduler() as scheduler, serving(scheduler) as front:
        events = await front.events(spec(PROMPT, n=3, **ASKED))
    assert kinds(events)[:2] == ["accepted", "prompt_logprobs"]
    first, *others = of_prompt(events)
    assert first == inference_pb2.TokenLogprobs()
    assert others == expected(demo_tokenizer().encode(PROMPT)[1:])
    assert [len(told) for told in check_deltas(events, n=3)] == [8, 8, 8]


async def test_a_prompt_of_one_token_has_none_to_tell() -> None:
    request = inference_pb2.GenerationSpec(
        token_ids={"ids": [9]}, stop={"max_tokens": 2}, sampling={"prompt_logprobs": 0}
    )
    async with FakeScheduler() as scheduler, serving(scheduler) as front:
        assert of_prompt(await front.events(request)) == [inference_pb2.TokenLogprobs()]


async def test_nobody_is_told_who_did_not_ask() -> None:
    async with FakeScheduler() as scheduler, serving(scheduler) as front:
        events = await front.events(spec(PROMPT, sampling={"seed": 3}))
    assert "prompt_logprobs" not in kinds(events)
    assert not any(event.delta.logprobs for event in events)


async def test_a_whole_answer_tells_the_same() -> None:
    async with FakeScheduler() as scheduler, serving(scheduler) as front:
        answer = await front.generate(spec(PROMPT, n=2, **ASKED))
        events = await front.events(spec(PROMPT, n=2, **ASKED))
    assert list(answer.prompt_logprobs.logprobs) == of_prompt(events)
    token_ids = check_deltas(events, n=2)
    assert [list(choice.logprobs) for choice in answer.choices] == [expected(told) for told in token_ids]


@pytest.mark.parametrize("num_before", [0, 3, 30])
async def test_a_stop_string_cuts_them_with_the_tokens(num_before: int) -> None:
    tokens = [*ids_of(" x") * num_before, *ids_of("stop here and"), *ids_of(" x") * 20]
    request = spec(PROMPT, max_tokens=200, stop={"stop_strings": ["here"]}, **ASKED)
    async with FakeScheduler(script=scripted(*tokens)) as scheduler, serving(scheduler) as front:
        events = await front.events(request)
    [token_ids] = check_deltas(events)
    assert events[-1].finished.matched_stop.stop_string == "here"
    assert len(token_ids) == events[-1].finished.usage.num_completion_tokens
    assert token_ids == tokens[: len(token_ids)]


async def test_they_come_with_tokens_that_have_no_text_yet() -> None:
    parts = ids_of("日")
    assert len(parts) > 1
    async with (
        FakeScheduler(script=scripted(*parts, then=10), paused=True) as scheduler,
        serving(scheduler) as front,
    ):
        call = front.stream(spec(PROMPT, max_tokens=len(parts), sampling={"logprobs": 1}))
        await call.read()
        await scheduler.step()
        delta = (await call.read()).event.delta
        assert (delta.text, list(delta.logprobs)) == ("", expected(parts[:1]))
        assert delta.logprobs[0].chosen.text == "\ufffd"
        scheduler.go_on()
        rest = await rest_of(call)
    assert "".join(event.delta.text for event in rest) == "日"
    assert [told for event in rest for told in event.delta.logprobs] == expected(parts[1:])


@pytest.mark.parametrize("num_steps", [1, 5])
async def test_a_scheduler_that_forgets_is_told_them_and_nobody_hears_them_twice(num_steps: int) -> None:
    async with FakeScheduler(paused=True) as scheduler, serving(scheduler) as front:
        call = front.stream(spec(PROMPT, n=2, **ASKED))
        events = [(await call.read()).event]
        await scheduler.step(num_steps)
        while sum(len(told) for told in check_deltas(events, n=2)) < 2 * num_steps:
            events.append((await call.read()).event)
        known = check_deltas(events, n=2)
        await scheduler.restart()
        await scheduler.wait_until(lambda: len(scheduler.added) == 2)
        told = [sequence.logprobs for sequence in scheduler.resubmissions[-1].sequences]
        assert told == [logprobs_of(token_ids) for token_ids in known]
        scheduler.go_on()
        events += await rest_of(call)
    assert of_prompt(events)
    assert [len(token_ids) for token_ids in check_deltas(events, n=2)] == [8, 8]


@pytest.mark.parametrize("num_gateways", [1, 2])
@pytest.mark.parametrize("num_known", [0, 1, 7, 8])
async def test_who_reads_again_is_told_those_behind_the_position(num_gateways: int, num_known: int) -> None:
    async with FakeScheduler() as scheduler, serving(scheduler) as front, serving(scheduler) as other:
        whole = await front.events(spec(PROMPT, request_id="r", **ASKED))
        [token_ids] = check_deltas(whole)
        num_bytes = len(demo_tokenizer().decode(token_ids[:num_known]).encode())
        again = await rest_of((front, other)[num_gateways - 1].resume("r", {0: (num_known, num_bytes)}))
    assert check_deltas(again, num_known=num_known) == [token_ids[num_known:]]
    # Who has text has had those of the prompt.
    assert ("prompt_logprobs" in kinds(again)) == (num_known == 0)
    if num_known == 0:
        assert of_prompt(again) == of_prompt(whole)
