from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.contract.events import Accepted, Delta, Finished, Recovered, Usage
from blockyard.contract.sampling import FinishReason, SamplingParams, StopCriteria
from blockyard.contract.scheduling import Abort, AbortReason, Acceptance, Adapter, Ending, Failure, Prefill, Recovery
from blockyard.errors import BlockyardError, Reason
from gateway.text.tokenizer import Tokenizer
from gateway.validation import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS, derive_seed
from tests.unit.gateway.core import FACTS
from tests.unit.gateway.harness import END_TOKEN, demo_tokenizer, ids_of

if TYPE_CHECKING:
    from gateway.live.reader import Reader
    from tests.unit.gateway.core import Core

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


async def waiting(generation: Reader) -> asyncio.Task[Any]:
    """Begins to wait for the next event, and makes sure that there is none yet."""
    task = asyncio.ensure_future(anext(generation))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def failure(generation: Reader) -> BlockyardError:
    with pytest.raises(BlockyardError) as raised:
        async for _ in generation:
            pass
    return raised.value


async def test_events_come_in_order_and_then_the_end(core: Core) -> None:
    generation = await core.start(return_token_ids=True)
    task = await waiting(generation)
    core.told(accepted=[Acceptance(1, 10)])
    assert await task == Accepted("r", 2, derive_seed(7, "r"), "demo")
    core.told(prefilled=[Prefill(10, 1)], sequence_ids=[10], token_ids=ids_of("cat")[:1])
    delta = await anext(generation)
    assert isinstance(delta, Delta) and delta.num_tokens == 1
    core.tokens(10, END_TOKEN, end=STOP)
    assert [event async for event in generation][-1] == Finished(0, STOP, None, Usage(2, 1, 2), "id")
    with pytest.raises(StopAsyncIteration):
        await anext(generation)


@pytest.mark.parametrize(("exact", "determinism_id"), [(True, "id"), (False, "")])
async def test_a_recovery_is_told_between_the_tokens_around_it(core: Core, exact: bool, determinism_id: str) -> None:
    generation = await core.accepted()
    first, second = ids_of("cat mat")[:2]
    core.tokens(10, first)
    core.told(recovered=(Recovery("r", "lost", 3, exact), Recovery("gone", "lost", 3, exact)))
    core.tokens(10, second, end=LENGTH)
    before, recovered, after, finished = [event async for event in generation]
    assert isinstance(before, Delta) and before.num_tokens == 1
    assert recovered == Recovered("lost", 3, exact)
    assert isinstance(after, Delta) and after.num_tokens == 2
    # The answer of two workers that differ repeats neither's.
    assert isinstance(finished, Finished) and finished.determinism_id == determinism_id


async def test_an_answer_tells_the_content_of_its_adapter(core: Core) -> None:
    """Also where another adapter has the name by now; never half of an identity."""
    core.link.loras = {"sql": Adapter(3, "sql", "/sql", "ab" * 32)}
    reader = await core.accepted(model="sql")
    core.link.loras = {"sql": Adapter(4, "sql", "/new", "cd" * 32)}
    core.tokens(core.first, 5, end=LENGTH)
    finished = [event async for event in reader][-1]
    assert isinstance(finished, Finished) and finished.determinism_id == "id+abababababababab"
    assert [(card.name, card.determinism_id) for card in core.service.models()] == [
        ("demo", "id"),
        ("sql", "id+cdcdcdcdcdcdcdcd"),
    ]
    reader = await core.accepted("lost", 20, model="sql")
    core.told(recovered=(Recovery("lost", "lost", 3, False),))
    core.tokens(core.first, 5, end=LENGTH)
    finished = [event async for event in reader][-1]
    assert isinstance(finished, Finished) and finished.determinism_id == ""


async def test_a_recovery_of_what_has_ended_here_is_not_told(core: Core) -> None:
    generation = await core.accepted(stop=StopCriteria(stop_strings=("cat",)))
    core.tokens(10, *ids_of("a cat"))
    core.told(recovered=(Recovery("r", "lost", 3, True),))
    assert isinstance([event async for event in generation][-1], Finished)


async def test_a_slow_reader_gets_one_delta_for_many_tokens(core: Core) -> None:
    generation = await core.accepted(return_token_ids=True)
    token_ids = ids_of("there was a cat that sat on the mat")
    for token_id in token_ids:
        core.tokens(10, token_id)
    core.tokens(10, END_TOKEN, end=STOP)
    delta, finished = [event async for event in generation]
    assert isinstance(delta, Delta) and isinstance(finished, Finished)
    assert delta.text == "there was a cat that sat on the mat"
    assert delta.token_ids == (*token_ids, END_TOKEN)


async def test_the_cached_tokens_of_a_step_that_also_ends_are_told(core: Core) -> None:
    generation = await core.accepted()
    core.told(prefilled=[Prefill(10, 2)], sequence_ids=[10], token_ids=[20], ended=[Ending(10, LENGTH)])
    finished = [event async for event in generation][-1]
    assert isinstance(finished, Finished) and finished.usage.num_cached_tokens == 2


async def test_a_request_without_id_gets_one_of_its_own(core: Core) -> None:
    first, second = await core.start(""), await core.start("")
    assert first.request_id != second.request_id
    assert first.request_id.startswith("gen-")


async def test_sequences_of_one_request_end_by_themselves(core: Core) -> None:
    generation = await core.accepted(n=2, stop=StopCriteria(stop_strings=("cat",)))
    core.told(sequence_ids=[10, 11], token_ids=[20, 21])
    core.tokens(11, *ids_of(" cat"))
    events: list[Any] = [await anext(generation)]
    while not isinstance(events[-1], Finished):
        events.append(await anext(generation))
    assert events[-1].index == 1 and events[-1].matched_stop == "cat"
    assert core.link.aborts == [Abort(1, "r", AbortReason.STOP_STRING, 1, events[-1].usage.num_completion_tokens)]
    assert core.live.num_running == 1
    # What was under way when the abort was sent is nobody's.
    core.told(sequence_ids=[10, 11], token_ids=[22, 23])
    core.tokens(10, 24, end=LENGTH)
    rest = [event async for event in generation]
    assert [event.index for event in rest] == [0, 0]
    assert core.live.num_running == 0


async def test_a_stop_string_is_found_though_nobody_reads(core: Core) -> None:
    generation = await core.accepted(stop=StopCriteria(stop_strings=("cat",)))
    for token_id in [*ids_of(" a cat"), *([20] * 30)]:
        core.tokens(10, token_id)
    assert core.link.aborts == [Abort(1, "r", AbortReason.STOP_STRING, 0, len(ids_of(" a cat")))]
    assert core.live.num_running == 0
    delta, finished = [event async for event in generation]
    assert isinstance(delta, Delta) and delta.text == " a "
    assert isinstance(finished, Finished) and finished.matched_stop == "cat"


async def test_a_stop_string_that_ends_with_the_sequence_needs_no_abort(core: Core) -> None:
    generation = await core.accepted(stop=StopCriteria(stop_strings=("cat",)))
    core.tokens(10, *ids_of(" a cat"), end=LENGTH)
    finished = [event async for event in generation][-1]
    assert isinstance(finished, Finished) and finished.finish_reason is STOP
    assert core.link.aborts == []


async def test_an_abort_that_crosses_the_end_changes_nothing(core: Core) -> None:
    generation = await core.accepted(stop=StopCriteria(stop_strings=("cat",)))
    core.tokens(10, *ids_of(" a cat"))
    task = asyncio.ensure_future(anext(generation))
    await task
    core.tokens(10, 30, end=LENGTH)
    finished = [event async for event in generation][-1]
    assert isinstance(finished, Finished) and finished.usage.num_completion_tokens == len(ids_of(" a cat"))


async def test_closing_aborts_what_runs_and_only_once(core: Core) -> None:
    generation = await core.accepted()
    await generation.aclose()
    await generation.aclose()
    generation.close()
    assert core.link.aborts == [Abort(1, "r")]
    assert (core.live.num_running, core.live.num_readers) == (0, 0)
    assert (await failure(generation)).reason is Reason.CLIENT_CANCELLED


async def test_closing_what_has_ended_aborts_nothing(core: Core) -> None:
    generation = await core.accepted()
    core.tokens(10, 20, end=LENGTH)
    await generation.aclose()
    assert core.link.aborts == []


async def test_cancel_wakes_the_reader_after_what_has_come(core: Core) -> None:
    generation = await core.accepted()
    core.tokens(10, *ids_of("cat"))
    assert (await core.service.cancel(["x", "r", "r"])).cancelled == ["r"]
    events = []
    with pytest.raises(BlockyardError) as raised:
        async for event in generation:
            events.append(event)
    assert raised.value.reason is Reason.CLIENT_CANCELLED
    assert [event.text for event in events if isinstance(event, Delta)] == ["cat"]
    assert core.link.aborts == [Abort(1, "r")]
    assert (await core.service.cancel(["r"])).cancelled == []


async def test_a_failure_of_the_scheduler_is_raised_as_it_is(core: Core) -> None:
    generation = await core.start()
    task = await waiting(generation)
    error = BlockyardError(Reason.NEVER_FITS, "too long")
    core.told(failed=[Failure(1, error), Failure(99, error)])
    with pytest.raises(BlockyardError) as raised:
        await task
    assert raised.value is error
    assert core.live.num_running == 0


@pytest.mark.parametrize("is_other", [False, True])
async def test_nothing_is_accepted_while_the_model_is_not_known_or_another(core: Core, is_other: bool) -> None:
    core.link.takes_requests, core.link.message = False, "the worker loads"
    core.link.has_other_model = is_other
    if not is_other:
        core.link.facts = None
    with pytest.raises(BlockyardError) as raised:
        await core.start(prompt="")
    error = raised.value
    assert (error.reason, error.message, error.retry_after_seconds) == (Reason.NO_READY_WORKER, "the worker loads", 1.0)
    assert core.link.sent == []


async def test_without_a_worker_a_request_waits(core: Core) -> None:
    core.link.is_ready, core.link.message = False, "the worker was lost"
    generation = await core.start()
    assert len(core.link.sent) == 1
    assert not core.service.is_ready()
    await generation.aclose()


async def test_the_scheduler_may_go_while_a_prompt_is_tokenized(core: Core) -> None:
    starting = asyncio.ensure_future(core.start(prompt="the cat " * 300))
    await asyncio.sleep(0)
    core.link.takes_requests = False
    generation = await starting
    assert core.link.sent == []
    core.attached()
    assert len(core.link.adds) == 1
    await generation.aclose()


async def test_the_same_request_twice_at_once_is_one(core: Core) -> None:
    prompt = "the cat " * 300
    first, second = await asyncio.gather(core.start(prompt=prompt), core.start(prompt=prompt))
    assert len(core.link.adds) == 1
    core.told(accepted=[Acceptance(1, 10)])
    core.tokens(10, 20, end=LENGTH)
    events = [event async for event in first]
    assert [event async for event in second] == events and isinstance(events[-1], Finished)


async def test_a_refused_request_leaves_its_id_free(core: Core) -> None:
    with pytest.raises(BlockyardError):
        await core.start(n=0)
    assert await core.start()


@pytest.mark.parametrize("length", [1, 3000])
async def test_half_a_surrogate_pair_is_no_text(core: Core, length: int) -> None:
    with pytest.raises(BlockyardError) as raised:
        await core.start(prompt="a\ud800" * length)
    assert raised.value.reason is Reason.FIELD_INVALID


async def test_a_namesake_is_not_taken_for_the_one_before(core: Core) -> None:
    first = await core.start()
    await first.aclose()
    second = await core.start()
    assert [(add.handle, add.submission.request_id) for add in core.link.adds] == [(1, "r"), (2, "r")]
    core.told(accepted=[Acceptance(1, 10), Acceptance(2, 11)], sequence_ids=[10, 11], token_ids=[20, 21])
    assert isinstance(await anext(second), Accepted)
    core.tokens(11, 22, end=LENGTH)
    delta, finished = [event async for event in second]
    assert isinstance(delta, Delta) and delta.text == demo_tokenizer().decode([21, 22])
    assert isinstance(finished, Finished) and finished.usage.num_completion_tokens == 2


async def test_draining_waits_for_the_last_reader(core: Core) -> None:
    generation = await core.accepted()
    core.service.start_draining()
    assert not core.service.is_ready() and core.service.readiness_message == "the gateway is stopping"
    drained = asyncio.ensure_future(core.service.wait_until_idle())
    core.tokens(10, 20, end=LENGTH)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not drained.done()
    await generation.aclose()
    async with asyncio.timeout(5):
        await drained


async def test_stopping_ends_what_runs_here_only(core: Core) -> None:
    generation = await core.accepted()
    core.service.stop(BlockyardError(Reason.DRAINING, "bye"))
    assert (await failure(generation)).reason is Reason.DRAINING
    await generation.aclose()
    assert core.link.aborts == []


async def test_what_came_before_a_failure_is_told_though_it_came_with_it(core: Core) -> None:
    generation = await core.accepted()
    error = BlockyardError(Reason.POISON_REQUEST, "it kills")
    core.told(sequence_ids=[10], token_ids=[20], failed=[Failure(1, error)])
    assert isinstance(await anext(generation), Delta)
    assert await failure(generation) is error


async def test_a_reader_that_is_cancelled_can_read_on(core: Core) -> None:
    generation = await core.accepted()
    task = await waiting(generation)
    task.cancel()
    await asyncio.wait([task])
    core.tokens(10, 20, end=LENGTH)
    assert len([event async for event in generation]) == 2


async def test_bad_words_beyond_the_limits_are_refused_unread(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(Tokenizer, "encode_bad_words", lambda _, words: read.extend(words) or [])
    words = ("a" * (MAX_BAD_WORD_CHARACTERS + 1), *["b"] * (2 * MAX_BAD_WORDS))
    with pytest.raises(BlockyardError) as raised:
        await core.start(sampling=SamplingParams(bad_words=words))
    assert {violation.field for violation in raised.value.violations} == {"sampling.bad_words"}
    assert set(read) == {"b"}
    assert len(read) < MAX_BAD_WORDS


# Predictions


async def test_a_predicted_text_becomes_ids(core: Core) -> None:
    await core.start(prediction="once upon a time")
    predicted = core.link.adds[0].submission.sampling.predicted_token_ids
    assert demo_tokenizer().decode(predicted, skip_special_tokens=False) == "once upon a time"


async def test_no_more_is_predicted_than_a_model_can_say(core: Core) -> None:
    await core.start(prediction="once upon a time " * 50_000)
    predicted = core.link.adds[0].submission.sampling.predicted_token_ids
    assert len(predicted) == FACTS.max_model_len


async def test_a_prediction_ends_at_what_a_model_cannot_say(core: Core) -> None:
    whole = demo_tokenizer().encode("once upon a time", add_special_tokens=False)
    core.attached(vocab_size=max(whole))
    await core.start(prediction="once upon a time")
    predicted = core.link.adds[0].submission.sampling.predicted_token_ids
    assert list(predicted) == list(whole[: list(whole).index(max(whole))])
