"""Both clients against a gateway on a socket: the same calls, the same values, the same errors."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import pytest

import blockyard
from blockyard import Accepted, AsyncClient, BlockyardError, Client, Delta, Finished, FinishReason, Reason, Usage
from blockyard.client.retry import RetryPolicy
from blockyard.contract.events import TokenLogprob
from blockyard.errors import TRANSPORT_ORIGIN
from blockyard.inference.v1 import inference_pb2
from tests.kit.fakes.fake_gateway import Cut, How

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kit.fakes.fake_gateway import FakeGateway

QUICK = RetryPolicy(max_attempts=3, initial_delay_seconds=0.001, resume_seconds=0.0)


@pytest.fixture
def client(gateway: FakeGateway) -> Iterator[Client]:
    with Client(gateway.target, retry=QUICK) as client:
        yield client


def unavailable(hint: float | None = 0.001) -> BlockyardError:
    return BlockyardError(Reason.NO_READY_WORKER, "not yet", retry_after_seconds=hint)


def test_everything_public_can_be_imported() -> None:
    for name in blockyard.__all__:
        assert getattr(blockyard, name)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        blockyard.Nothing  # noqa: B018


def test_generate(client: Client) -> None:
    completion = client.generate("one two", max_tokens=3, return_token_ids=True, request_id="r-1", seed=5)
    assert completion.text == "one two one"
    assert completion.token_ids == (3, 3, 3)
    assert (completion.request_id, completion.seed, completion.model) == ("r-1", 5, "fake")
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.usage == Usage(2, 1, 3)
    assert completion.determinism_id == "d"


def test_generate_several(client: Client) -> None:
    completion = client.generate([2, 1], n=3, max_tokens=2, stop=["x"])
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert {choice.text for choice in completion.choices} == {"xx x"}
    assert completion.choices[1].matched_stop == "x"
    assert completion.usage.num_completion_tokens == 6


def test_a_stream_tells_events_and_the_whole(client: Client) -> None:
    with client.stream("one two", max_tokens=2, stop_token_ids=[9], request_id="r") as stream:
        events = list(stream)
    assert events == [
        Accepted("r", 2, 7, "fake"),
        Delta(0, "one", (), 1, 3),
        Delta(0, " two", (), 2, 7),
        Finished(0, FinishReason.STOP, 9, Usage(2, 1, 2), "d"),
    ]
    assert stream.result() == client.generate("one two", max_tokens=2, stop_token_ids=[9], request_id="r")
    assert stream.num_resumes == 0


def test_text_deltas_are_of_one_sequence(client: Client) -> None:
    assert list(client.stream("a b", n=2, max_tokens=3).text_deltas(1)) == ["a", " b", " a"]


def test_log_probabilities_and_beams(client: Client) -> None:
    completion = client.generate(
        "one two", max_tokens=2, logprobs=1, prompt_logprobs=0, n=2, beam_search=blockyard.BeamSearch(width=4)
    )
    assert [place.chosen and place.chosen.logprob for place in completion.prompt_logprobs] == [None, -1.0]
    for index, choice in enumerate(completion.choices):
        assert choice.score == -float(index)
        chosen = [place.chosen for place in choice.logprobs]
        assert chosen == [TokenLogprob(3, "one", 0.0, 2), TokenLogprob(3, " two", -1.0, 2)]
        assert [place.top for place in choice.logprobs] == [(TokenLogprob(0, "?", -0.5, 1),)] * 2


def test_cancelling_by_id(gateway: FakeGateway, client: Client) -> None:
    gateway.hold_after = 1
    stream = client.stream("a", request_id="runs")
    next(stream)
    assert client.cancel("runs", "unknown") == ["runs"]
    assert client.cancel("runs") == []


def test_the_small_calls(client: Client) -> None:
    assert client.tokenize("ab c") == [0, 2, 1]
    assert client.tokenize("ab c", add_special_tokens=False) == [2, 1]
    assert client.detokenize([2, 1]) == "xx x"
    (model,) = client.list_models()
    assert (model.name, model.max_model_len, model.vocab_size, model.batch_invariant) == ("fake", 64, 10, True)


def test_an_error_keeps_its_reason_and_violations(gateway: FakeGateway, client: Client) -> None:
    violation = blockyard.Violation("sampling.top_p", "0 < top_p <= 1")
    for call in (lambda: client.generate("x"), lambda: list(client.stream("x"))):
        gateway.failures.append(BlockyardError(Reason.FIELD_INVALID, "bad", (violation,)))
        with pytest.raises(BlockyardError) as caught:
            call()
        assert caught.value.violations == (violation,)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.metadata == {}
    assert len(gateway.specs) == 2


@pytest.mark.parametrize("num_failures", [1, 2])
def test_unavailable_is_tried_again_before_the_first_message(
    gateway: FakeGateway, client: Client, num_failures: int
) -> None:
    gateway.failures.extend(unavailable() for _ in range(num_failures))
    assert client.generate("x", max_tokens=1).text == "x"
    gateway.failures.extend(unavailable(None) for _ in range(num_failures))
    assert client.stream("x", max_tokens=1).result().text == "x"


def test_tries_are_bounded(gateway: FakeGateway, client: Client) -> None:
    gateway.failures.extend(unavailable() for _ in range(6))
    with pytest.raises(BlockyardError, match="not yet"):
        client.generate("x")
    with pytest.raises(BlockyardError, match="not yet"):
        next(client.stream("x"))
    assert len(gateway.specs) == 6


def test_a_request_that_ends_with_its_connection_is_not_resumed(gateway: FakeGateway, client: Client) -> None:
    gateway.failures.append(unavailable())
    gateway.cuts.append(Cut(2))
    stream = client.stream("a b c", on_disconnect="abort")
    assert [next(stream), next(stream)]
    with pytest.raises(BlockyardError, match="in the midst"):
        next(stream)
    assert list(stream) == []
    assert (len(gateway.specs), gateway.resumes) == (2, [])
    assert {spec.on_disconnect for spec in gateway.specs} == {inference_pb2.ON_DISCONNECT_ABORT}
    assert not gateway.specs[1].return_token_ids


@pytest.mark.parametrize(("how", "told"), [(How.GAP, "seq 3 came, 2 was due"), (How.END, "before 1 of its sequences")])
def test_events_that_are_lost_for_good_are_an_error(gateway: FakeGateway, client: Client, how: How, told: str) -> None:
    gateway.cuts.append(Cut(2, how))
    with pytest.raises(BlockyardError, match=told):
        list(client.stream("a b c", on_disconnect="abort"))


def test_a_hint_beyond_the_deadline_is_not_waited_for(gateway: FakeGateway) -> None:
    gateway.failures.append(unavailable(60.0))
    with Client(gateway.target, retry=RetryPolicy(max_delay_seconds=60.0)) as client:
        with pytest.raises(BlockyardError, match="not yet"):
            client.generate("x", timeout=5)
        gateway.failures.append(unavailable(60.0))
        with pytest.raises(BlockyardError, match="not yet"):
            next(client.stream("x", timeout=5))


@pytest.mark.parametrize("on_disconnect", ["keep", "abort"])
def test_leaving_a_stream_cancels_it(gateway: FakeGateway, client: Client, on_disconnect: Any) -> None:
    gateway.hold_after = 2
    with client.stream("a b", request_id="left", on_disconnect=on_disconnect) as stream:
        assert [next(stream), next(stream)]
    assert gateway.saw_cancel.wait(10)
    assert gateway.cancelled == ["left"]
    assert list(stream) == []
    stream.close()


def test_forgetting_a_stream_cancels_it(gateway: FakeGateway, client: Client) -> None:
    gateway.hold_after = 1
    for _ in client.stream("a b", request_id="forgotten"):
        break
    gc.collect()
    assert gateway.saw_cancel.wait(10)


def test_closing_from_another_thread_ends_the_reader(gateway: FakeGateway, client: Client) -> None:
    gateway.hold_after = 1
    stream = client.stream("a b")
    next(stream)
    threading.Timer(0.05, stream.close).start()
    assert list(stream) == []


def test_a_timeout_has_a_reason(gateway: FakeGateway, client: Client) -> None:
    gateway.hold_after = 1
    with pytest.raises(BlockyardError) as caught:
        list(client.stream("a", timeout=0.1))
    assert caught.value.reason is Reason.GENERATION_DEADLINE
    assert gateway.saw_cancel.wait(10)


def test_many_threads_share_a_client(client: Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        words = [f"w{number}" for number in range(40)]
        texts = list(pool.map(lambda word: client.stream(word, max_tokens=1).result().text, words))
    assert texts == words


@pytest.fixture
def nowhere() -> str:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{unused.getsockname()[1]}"


def test_nobody_there(nowhere: str) -> None:
    with Client(nowhere, retry=QUICK) as client:
        with pytest.raises(BlockyardError) as caught:
            client.generate("x")
        assert caught.value.reason is Reason.NO_READY_WORKER
        assert caught.value.metadata == TRANSPORT_ORIGIN
        with pytest.raises(BlockyardError, match="not ready: failed to connect"):
            client.wait_until_ready(timeout=0.2)


def test_waiting_until_ready(gateway: FakeGateway, client: Client) -> None:
    client.wait_until_ready()
    gateway.ready = False
    with pytest.raises(BlockyardError, match="not ready: it answers"):
        client.wait_until_ready(timeout=0.2)
    threading.Timer(0.15, setattr, (gateway, "ready", True)).start()
    client.wait_until_ready(timeout=10)


async def test_async_calls(async_gateway: FakeGateway) -> None:
    async with AsyncClient(async_gateway.target, retry=QUICK) as client:
        await client.wait_until_ready(timeout=10)
        completion = await client.generate("one two", max_tokens=3, request_id="r")
        assert completion.text == "one two one"
        assert await client.stream("one two", max_tokens=3, request_id="r").result() == completion
        assert [text async for text in client.stream("a b", n=2, max_tokens=2).text_deltas(1)] == ["a", " b"]
        assert await client.tokenize("ab c") == [0, 2, 1]
        assert await client.detokenize([2, 1]) == "xx x"
        assert [model.name for model in await client.list_models()] == ["fake"]


async def test_async_retries_and_errors(async_gateway: FakeGateway) -> None:
    async with AsyncClient(async_gateway.target, retry=QUICK) as client:
        async_gateway.failures.extend([unavailable(), unavailable(None)])
        assert (await client.generate("x", max_tokens=1)).text == "x"
        async_gateway.failures.extend([unavailable(), unavailable(None)])
        assert len(await client.list_models()) == 1
        async_gateway.failures.extend(unavailable() for _ in range(6))
        with pytest.raises(BlockyardError, match="not yet"):
            await client.list_models()
        with pytest.raises(BlockyardError, match="not yet"):
            await client.stream("x").result()
        async_gateway.cuts.extend([Cut(2), Cut(1, How.GAP), Cut(2, How.END)])
        for told in ("in the midst", "lost", "ended before 2"):
            with pytest.raises(BlockyardError, match=told):
                await client.stream("x", n=2, on_disconnect="abort").result()


@pytest.mark.parametrize("on_disconnect", ["keep", "abort"])
async def test_leaving_an_async_stream_cancels_it(async_gateway: FakeGateway, on_disconnect: Any) -> None:
    async_gateway.hold_after = 1
    async with AsyncClient(async_gateway.target) as client:
        async with client.stream("a", request_id="left", on_disconnect=on_disconnect) as stream:
            await anext(stream)
        assert [event async for event in stream] == []
        await asyncio.to_thread(async_gateway.saw_cancel.wait, 10)
        assert async_gateway.cancelled == ["left"]


async def test_closing_an_async_stream_ends_its_reader(async_gateway: FakeGateway) -> None:
    async_gateway.hold_after = 1
    async with AsyncClient(async_gateway.target) as client:
        stream = client.stream("a")
        await anext(stream)
        reading = asyncio.create_task(stream.result())
        await asyncio.sleep(0)
        stream.close()
        with pytest.raises(ValueError, match="not ended"):
            await asyncio.wait_for(reading, 10)


async def test_cancelling_the_task_that_reads(async_gateway: FakeGateway) -> None:
    async_gateway.hold_after = 1
    async with AsyncClient(async_gateway.target) as client:
        stream = client.stream("a")
        await anext(stream)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.05)
        await asyncio.to_thread(async_gateway.saw_cancel.wait, 10)
        assert len(async_gateway.cancelled) == 1


async def test_async_waiting(async_gateway: FakeGateway, nowhere: str) -> None:
    async_gateway.ready = False
    async with AsyncClient(async_gateway.target) as client:
        with pytest.raises(BlockyardError, match="it answers"):
            await client.wait_until_ready(timeout=0.15)
    async with AsyncClient(nowhere) as client:
        with pytest.raises(BlockyardError, match="failed to connect"):
            await client.wait_until_ready(timeout=0.15)


async def test_a_closed_async_client_connects_again(async_gateway: FakeGateway) -> None:
    client = AsyncClient(async_gateway.target)
    await client.list_models()
    await client.close()
    assert await client.list_models()
    await client.close()


def test_a_server_that_starts_late_is_found(nowhere: str) -> None:
    with Client(nowhere) as client, ThreadPoolExecutor(1) as pool:
        waiting: Any = pool.submit(client.wait_until_ready, 20)
        asyncio.run(_serve_until(int(nowhere.split(":")[1]), waiting))


async def _serve_until(port: int, waiting: Any) -> None:
    from tests.kit.fakes.fake_gateway import FakeGateway

    gateway = FakeGateway()
    await gateway.start(port)
    await asyncio.wrap_future(waiting)
    await gateway.stop()


def test_a_sequence_that_fails_has_its_error_beside_its_neighbour(gateway: FakeGateway) -> None:
    gateway.failing = frozenset({1})
    with Client(gateway.target) as client:
        answer = client.generate("one two", n=2, max_tokens=2)
    good, bad = answer.choices
    assert (good.finish_reason, good.error) == (FinishReason.LENGTH, None)
    assert (bad.finish_reason, bad.error) == (FinishReason.ERROR, gateway.sequence_error)


def test_an_answer_of_which_every_sequence_fails_is_raised(gateway: FakeGateway) -> None:
    gateway.failing = frozenset({0, 1})
    with Client(gateway.target) as client:
        with pytest.raises(BlockyardError, match="not a number") as raised:
            client.generate("one two", n=2, max_tokens=2)
        assert raised.value.reason is Reason.NOT_FINITE
        told = client.stream("one two", n=2, max_tokens=2)
        ends = [next(told)]
        with pytest.raises(BlockyardError, match="not a number"):
            ends.extend(told)
    # What came before it was told.
    assert [event.error for event in ends if isinstance(event, Finished)] == [gateway.sequence_error] * 2
    assert len(gateway.specs) == 2


async def test_the_asynchronous_client_tells_failed_sequences_too(async_gateway: FakeGateway) -> None:
    async with AsyncClient(async_gateway.target) as client:
        async_gateway.failing = frozenset({1})
        answer = await client.generate("one two", n=2, max_tokens=2)
        assert [choice.error for choice in answer.choices] == [None, async_gateway.sequence_error]
        async_gateway.failing = frozenset({0, 1})
        with pytest.raises(BlockyardError, match="not a number"):
            await client.generate("one two", n=2, max_tokens=2)
