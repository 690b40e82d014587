"""What became of predictions stands in `usage`, over each API and over the deaths of services."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from blockyard import AsyncClient, Client
from blockyard.contract.events import Delta, Finished
from tests.integration.conftest import DEMO
from tests.kit.processes.system import System
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPT = "Once upon a time"
FLAGS = ["--dtype", "float32", "--num-device-blocks", "120", "--num-host-blocks", "8", "--debug-integrity"]
FLAGS += ["--speculation", "ngram", "--max-draft-tokens", "3"]
NUM_STREAMS = 8


def options_of(seed: int, **others: Any) -> dict[str, Any]:
    asked = {"temperature": 0.9, "seed": seed, "max_tokens": 100, "ignore_eos": True, "return_token_ids": True}
    return asked | others


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(DEMO, tmp_path_factory.mktemp("system"), FLAGS) as system:
        yield system


def test_the_clients_have_the_counts(system: System) -> None:
    with Client(system.grpc_target) as client:
        free = client.generate(PROMPT, **options_of(3, n=2))
        assert free.usage.prediction is None
        # One answer is predicted, and the other one is not.
        predicted = free.choices[0].token_ids
        answer = client.generate(PROMPT, **options_of(3, n=2, predicted_token_ids=predicted))
        assert [choice.token_ids for choice in answer.choices] == [choice.token_ids for choice in free.choices]
        right, wrong = (choice.usage.prediction for choice in answer.choices)
        assert right is not None and wrong is not None
        assert right.num_accepted_tokens > 50 > wrong.num_accepted_tokens
        assert answer.usage.prediction == right.plus(*wrong)
        refused = client.generate(PROMPT, **options_of(3, predicted_token_ids=predicted, speculation=False))
        assert refused.choices[0].token_ids == predicted
        assert refused.usage.prediction == (0, 0)


def test_openai_has_the_counts(system: System) -> None:
    with openai.OpenAI(base_url=f"{system.http_url}/v1", api_key="none") as client:
        asked: Any = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 100, "seed": 4}
        asked["extra_body"] = {"ignore_eos": True}
        free = client.chat.completions.create(**asked)
        assert free.usage is not None and free.usage.completion_tokens_details is None
        content = free.choices[0].message.content or ""
        asked["prediction"] = {"type": "content", "content": content}
        answer = client.chat.completions.create(**asked)
        assert answer.choices[0].message.content == content
        details = answer.usage and answer.usage.completion_tokens_details
        assert details and details.accepted_prediction_tokens and details.accepted_prediction_tokens > 20
        assert details.rejected_prediction_tokens is not None
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        assert chunks[-1].usage and chunks[-1].usage.completion_tokens_details
        assert (chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens or 0) > 20


def test_a_request_may_refuse_drafts_over_http(system: System) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 50, "seed": 5, "return_token_ids": True, "temperature": 0.9}
    with httpx.Client(base_url=system.http_url, timeout=60) as http:
        free = http.post("/v1/completions", json=asked).json()
        predicted = free["choices"][0]["token_ids"]
        refused = http.post("/v1/completions", json=asked | {"predicted_token_ids": predicted, "speculation": False})
    assert refused.json()["choices"][0]["token_ids"] == predicted
    details = refused.json()["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


async def test_counts_outlive_a_worker_and_a_scheduler(tmp_path: Path) -> None:
    progress = dict.fromkeys(range(NUM_STREAMS), 0)
    predicted: dict[int, tuple[int, ...]] = {}

    async def follow(client: AsyncClient, seed: int) -> tuple[tuple[int, ...], Finished]:
        ids: tuple[int, ...] = ()
        asked = options_of(seed, max_tokens=400, predicted_token_ids=predicted.get(seed, ()))
        async for event in client.stream(PROMPT, **asked):
            if isinstance(event, Delta):
                ids += event.token_ids
                progress[seed] = len(ids)
            elif isinstance(event, Finished):
                finished = event
        return ids, finished

    with System(DEMO, tmp_path / "system", FLAGS) as system:
        async with AsyncClient(system.grpc_target) as client:
            alone = await asyncio.gather(*(follow(client, seed) for seed in progress))
            predicted.update({seed: ids for seed, (ids, _) in enumerate(alone)})
            progress.update(dict.fromkeys(progress, 0))
            streams = asyncio.gather(*(follow(client, seed) for seed in progress))
            for name in ("worker", "scheduler"):
                before = sum(progress.values())
                await until(lambda: sum(progress.values()) > before + 400)  # noqa: B023
                assert not streams.done()
                system.services[name].stop(signal.SIGKILL)
                system.start_service(name)
            for (ids, finished), (expected, _) in zip(await streams, alone, strict=True):
                assert ids == expected
                assert finished.usage.prediction is not None
                # Nearly all tokens but one of four are drafts that were right. Without the records of the gateway, the
                # tokens before the scheduler's death would be missing.
                assert finished.usage.prediction.num_accepted_tokens > 0.6 * len(ids)
