"""Budgets of reasoning on the real services, with a demo model whose tokenizer has tokens around reasoning."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from blockyard import AsyncClient, Client, StructuredOutputsParams
from blockyard.contract.events import Delta
from tests.kit.demo_tokens import END_ID, write_thinking_model
from tests.kit.processes.system import System
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from blockyard.client.chat import ChatOptions
    from blockyard.client.results import Completion
    from blockyard.contract.events import Event

HI: list[dict[str, Any]] = [{"role": "user", "content": "Once upon a time"}]
FLAGS = ["--dtype", "float32", "--num-device-blocks", "60", "--num-host-blocks", "8", "--debug-integrity"]
SEEDS = range(8)


def options_of(seed: int, **others: Any) -> ChatOptions:
    given: Any = {"temperature": 1.2, "seed": seed, "max_tokens": 60, "return_token_ids": True, "ignore_eos": True}
    return given | others


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("thinking")
    with System(write_thinking_model(folder / "model"), folder / "system", FLAGS) as system:
        yield system


def texts_of(answer: Completion) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(choice.reasoning_text, choice.text, choice.token_ids) for choice in answer.choices]


def texts_by_index(events: Iterable[Event]) -> dict[int, tuple[str, str]]:
    """The reasoning and the text of each sequence."""
    told: dict[int, tuple[str, str]] = {}
    for event in events:
        if isinstance(event, Delta):
            reasoning, text = told.get(event.index, ("", ""))
            told[event.index] = (reasoning + event.reasoning_text, text + event.text)
    return told


@pytest.mark.parametrize("budget", [0, 1, 20])
def test_reasoning_ends_at_its_budget_in_every_sequence(system: System, budget: int) -> None:
    with Client(system.grpc_target) as client:
        free = client.chat(HI, **options_of(3, n=3))
        answer = client.chat(HI, **options_of(3, n=3, thinking_token_budget=budget))
        stream = client.stream_chat(HI, **options_of(3, n=3, thinking_token_budget=budget))
        for _ in stream:
            pass
    for choice, unlimited in zip(answer.choices, free.choices, strict=True):
        # The demo model never ends its reasoning by itself.
        assert END_ID not in unlimited.token_ids
        assert unlimited.reasoning_text
        assert not unlimited.text
        assert choice.token_ids[: budget + 1] == (*unlimited.token_ids[:budget], END_ID)
        assert choice.text
        assert len(choice.token_ids) == 60
        assert unlimited.reasoning_text.startswith(choice.reasoning_text)
    assert texts_of(stream.result()) == texts_of(answer)


def test_a_form_follows_reasoning_that_was_ended(system: System) -> None:
    with Client(system.grpc_target) as client:
        form = StructuredOutputsParams(choice=["yes", "no"])
        asked = options_of(1, structured_outputs=form, thinking_token_budget=9, ignore_eos=False)
        (choice,) = client.chat(HI, **asked).choices
    assert choice.token_ids.index(END_ID) == 9
    assert choice.text in ("yes", "no")


def test_each_http_api_keeps_to_it(system: System) -> None:
    sampling: dict[str, Any] = {"temperature": 1.2, "seed": 5}
    with httpx.Client(base_url=system.http_url, timeout=60) as http:
        chat = {"messages": HI, "max_tokens": 40, "thinking_token_budget": 6, "ignore_eos": True, **sampling}
        answer = http.post("/v1/chat/completions", json=chat).json()
        message = answer["choices"][0]["message"]
        assert message["content"]
        events = http.post("/v1/chat/completions", json=chat | {"stream": True}).text.split("\n\n")
        chunks = [json.loads(event.partition("data: ")[2]) for event in events if "data: {" in event]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
        assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
        unlimited = http.post("/v1/chat/completions", json=chat | {"thinking_token_budget": -1}).json()
        assert not unlimited["choices"][0]["message"]["content"]
        thinking = {"type": "enabled", "budget_tokens": 6}
        asked = {"model": "model", "messages": HI, "max_tokens": 40, "thinking": thinking}
        blocks = http.post("/v1/messages", json=asked).json()["content"]
        assert blocks[0]["type"] == "thinking"
        off = http.post("/v1/messages", json=asked | {"thinking": {"type": "disabled"}}).json()["content"]
        assert "thinking" not in [block["type"] for block in off]


async def test_an_answer_is_the_same_over_the_death_of_a_worker(tmp_path: Path) -> None:
    progress = dict.fromkeys(SEEDS, 0)

    async def follow(client: AsyncClient, seed: int) -> dict[int, tuple[int, ...]]:
        ids: dict[int, tuple[int, ...]] = {}
        asked = options_of(seed, n=1 + 2 * (seed % 2), max_tokens=200, thinking_token_budget=20 + 15 * seed)
        async for event in client.stream_chat(HI, **asked):
            if isinstance(event, Delta):
                ids[event.index] = ids.get(event.index, ()) + event.token_ids
                progress[seed] = event.num_tokens
        return ids

    async def follow_all(client: AsyncClient) -> list[dict[int, tuple[int, ...]]]:
        return await asyncio.gather(*(follow(client, seed) for seed in SEEDS))

    with System(write_thinking_model(tmp_path / "model"), tmp_path / "system", FLAGS) as system:
        async with AsyncClient(system.grpc_target) as client:
            undisturbed = await follow_all(client)
            progress.update(dict.fromkeys(SEEDS, 0))
            streams = asyncio.create_task(follow_all(client))
            for _ in range(3):
                before = sum(progress.values())
                await until(lambda: sum(progress.values()) > before + 120)  # noqa: B023
                assert not streams.done()
                system.services["worker"].stop(signal.SIGKILL)
                system.start_service("worker")
            assert await streams == undisturbed
            for seed, answer in zip(SEEDS, undisturbed, strict=True):
                assert {ids.index(END_ID) for ids in answer.values()} == {20 + 15 * seed}
            asked = options_of(1, request_id="mine", n=3, thinking_token_budget=9)
            again = [event async for event in client.stream_chat(HI, **asked)]
            resumed = [event async for event in client.resume("mine")]
            assert texts_by_index(resumed) == texts_by_index(again)
