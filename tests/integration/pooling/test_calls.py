"""Calls for vectors, scores and labels through real services, before a worker whose numbers are known."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from array import array
from typing import TYPE_CHECKING, Any

import grpc.aio
import openai
import pytest

from blockyard.contract.models import Task
from blockyard.errors import Reason, from_rpc_error
from blockyard.inference.v1 import inference_pb2
from tests.integration.pooling.harness import LABELS, WORDS, services
from tests.kit.oracles.pooled_numbers import NUM_NUMBERS
from tests.kit.waiting import until
from tests.unit.blockyard.cli.invoking import run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    import httpx

    from tests.integration.pooling.harness import Services

TEXTS = [" ".join(WORDS[(place * 7 + step * 3) % 90] for step in range(1 + place % 40)) for place in range(256)]
JSON = {"content-type": "application/json"}
FOUR_LINES = ["w1 w2", "w3", "w1 w2", "w4 w5 w6"]


async def test_openai_client_reads_both_encodings(tmp_path: Path, sockets: str) -> None:
    async with services(tmp_path, sockets, Task.EMBED) as running:
        base_url = f"{running.http.base_url}/v1"
        client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, http_client=running.http)
        # By default the client asks for base64, and decodes it.
        default = await client.embeddings.create(model="model", input=FOUR_LINES, user="somebody")
        floats = await client.embeddings.create(model="model", input=FOUR_LINES, encoding_format="float")
        assert [each.embedding for each in default.data] == [each.embedding for each in floats.data]
        assert [each.index for each in floats.data] == [0, 1, 2, 3]
        assert floats.data[0].embedding == floats.data[2].embedding != floats.data[1].embedding
        assert all(math.isclose(sum(x * x for x in each.embedding), 1, rel_tol=1e-6) for each in floats.data)
        assert floats.usage.prompt_tokens == floats.usage.total_tokens == 8 + 4 * 2
        short = await client.embeddings.create(model="model", input="w3", dimensions=3)
        assert len(short.data[0].embedding) == 3
        ids = await client.embeddings.create(model="model", input=[[1, 7, 8, 2], [1, 9, 2]], encoding_format="base64")
        decoded = array("f", base64.b64decode(str(ids.data[0].embedding)))
        assert decoded.tolist() == floats.data[0].embedding
        alone = await client.embeddings.create(model="model", input=[1, 9, 2])
        assert alone.data[0].embedding == floats.data[1].embedding


async def test_prompts_truncation_and_usage(tmp_path: Path, sockets: str) -> None:
    async with services(tmp_path, sockets, Task.EMBED) as running:
        plain, prompted, cut = [
            await running.embed(*arguments, **fields)
            for arguments, fields in (
                ((["find: w1", "w1 w2"],), {}),
                ((["w1", "w1"],), {"prompt_name": "query"}),
                ((["w1 w2 w3 w4"],), {"spec": inference_pb2.PoolingSpec(truncate_prompt_tokens=4)}),
            )
        ]
        assert prompted == [plain[0]] * 2
        assert cut == [plain[1]]


async def kill_worker(running: Services) -> None:
    await running.worker.kill()
    await running.start_worker()


async def restart_scheduler(running: Services) -> None:
    await running.scheduler.stop()
    await running.start_scheduler()


@pytest.mark.parametrize("fail", [kill_worker, restart_scheduler])
async def test_a_loss_in_the_middle_of_256_inputs_changes_no_bit(
    tmp_path: Path, sockets: str, fail: Callable[[Services], Awaitable[None]]
) -> None:
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 64}
    async with services(tmp_path, sockets, Task.EMBED, settings=settings, step_seconds=0.01) as running:
        undisturbed = await running.embed(TEXTS)
        call = asyncio.create_task(running.embed(TEXTS))
        # When some have their numbers, and others do not.
        await until(lambda: 0 < running.gateway.generation.num_requests < 200)
        assert not call.done()
        await fail(running)
        assert await call == undisturbed
        assert running.gateway.generation.num_requests == 0


async def test_an_input_has_its_bits_alone_and_among_others_in_any_pieces(tmp_path: Path, sockets: str) -> None:
    found: list[list[bytes]] = []
    for number, settings in enumerate(({}, {"max_num_batched_tokens": 7, "max_num_seqs": 3})):
        (tmp_path / str(number)).mkdir()
        async with services(tmp_path / str(number), sockets, Task.EMBED, settings=settings) as running:
            found.append(await running.embed(TEXTS[:64]))
            found.append([(await running.embed([text]))[0] for text in TEXTS[:8]])
    assert found[0] == found[2]
    assert found[1] == found[3] == found[0][:8]


async def test_whole_prompts_go_in_one_step_or_are_refused_with_the_limit(tmp_path: Path, sockets: str) -> None:
    settings = {"max_num_batched_tokens": 16}
    async with services(tmp_path, sockets, Task.EMBED, settings=settings, whole_prompts=True) as running:
        texts = [text for text in TEXTS if len(text.split()) <= 14]
        assert len(await running.embed(texts)) == len(texts)
        with pytest.raises(Exception) as caught:
            await running.embed(["w1 " * 15])
        error = from_rpc_error(caught.value)  # type: ignore[arg-type]
        assert error.reason is Reason.PROMPT_TOO_LONG
        assert "17 tokens" in error.message and "16 tokens" in error.message
        spec = inference_pb2.PoolingSpec(truncate_prompt_tokens=-1)
        assert await running.embed(["w1 " * 15], spec=spec) == await running.embed(["w1 " * 14])


async def test_rerank_in_the_forms_of_cohere_and_jina(tmp_path: Path, sockets: str) -> None:
    async with services(tmp_path, sockets, Task.SCORE) as running:
        body: dict[str, Any] = {"model": "model", "query": "w1 w2", "documents": ["w3", "w4 w5", "w6"]}
        answers = [
            (await running.http.post(path, json=body)).json() for path in ("/rerank", "/v1/rerank", "/v2/rerank")
        ]
        results = answers[0]["results"]
        assert all(answer["results"] == results for answer in answers)
        scores = [each["relevance_score"] for each in results]
        assert scores == sorted(scores, reverse=True) and all(0 <= score <= 1 for score in scores)
        body |= {"top_n": 2, "return_documents": True, "documents": [{"text": "w3"}, {"text": "w4 w5"}, "w6"]}
        best = (await running.http.post("/v1/rerank", json=body)).json()["results"]
        texts = ["w3", "w4 w5", "w6"]
        assert best == [each | {"document": {"text": texts[each["index"]]}} for each in results[:2]]
        scored = await running.http.post("/v1/score", json={"text_1": "w1 w2", "text_2": texts})
        by_index = {each["index"]: each["score"] for each in scored.json()["data"]}
        assert by_index == {each["index"]: each["relevance_score"] for each in results}
        other = await running.http.post("/score", json={"text_1": "w1 w2", "text_2": texts, "instruction": "w9"})
        assert {each["index"]: each["score"] for each in other.json()["data"]} != by_index


async def test_scores_of_a_model_of_vectors_are_cosines(tmp_path: Path, sockets: str) -> None:
    async with services(tmp_path, sockets, Task.EMBED) as running:
        query, document = (array("f", values) for values in await running.embed(["find: w1", "w2"]))
        body = {"text_1": "w1", "text_2": ["w2", "find: w1"]}
        data = (await running.http.post("/score", json=body)).json()["data"]
        assert data[0]["score"] == pytest.approx(sum(a * b for a, b in zip(query, document, strict=True)), abs=1e-6)
        assert data[1]["score"] == pytest.approx(1.0)
        pairs = (await running.http.post("/score", json={"text_1": ["w1", "w2"], "text_2": ["w2", "w1"]})).json()
        assert pairs["data"][0]["score"] == data[0]["score"]


async def test_labels(tmp_path: Path, sockets: str) -> None:
    async with services(tmp_path, sockets, Task.CLASSIFY) as running:
        answer = (await running.http.post("/classify", json={"input": ["w1", "w2 w3"]})).json()
        assert answer["labels"] == list(LABELS.values())
        for each in answer["data"]:
            assert each["num_classes"] == 3 and sum(each["probs"]) == pytest.approx(1)
            assert each["label"] == answer["labels"][each["probs"].index(max(each["probs"]))]
        raw = (await running.http.post("/classify", json={"input": "w1", "use_activation": False})).json()
        assert sum(raw["data"][0]["probs"]) != pytest.approx(1)


async def test_a_call_is_cancelled_whole_and_fails_whole(tmp_path: Path, sockets: str) -> None:
    async with services(tmp_path, sockets, Task.EMBED, settings={"max_num_seqs": 4}, step_seconds=0.02) as running:
        spec = inference_pb2.PoolingSpec(request_id="mine")
        call = asyncio.create_task(running.embed(TEXTS, spec=spec))
        await until(lambda: running.gateway.generation.num_requests > 0)
        answer = await running.http.delete("/v1/requests/mine")
        assert answer.json() == {"id": "mine", "cancelled": True}
        with pytest.raises(Exception) as caught:
            await call
        assert from_rpc_error(caught.value).reason is Reason.CLIENT_CANCELLED  # type: ignore[arg-type]
        assert running.gateway.generation.num_requests == 0
        running.worker.fail_sequences = {300}
        with pytest.raises(Exception) as caught:
            await running.embed(TEXTS)
        failure = from_rpc_error(caught.value)  # type: ignore[arg-type]
        assert failure.reason is Reason.NOT_FINITE and failure.message.startswith("inputs[")
        assert running.gateway.generation.num_requests == 0
        # And the next one finds nothing of it.
        assert len(await running.embed(TEXTS[:3])) == 3


async def test_a_call_sent_again_has_its_answer_and_its_name_is_nobody_elses(tmp_path: Path, sockets: str) -> None:
    async with services(tmp_path, sockets, Task.EMBED) as running:
        headers = {"Idempotency-Key": "mine"}

        async def send(text: str) -> httpx.Response:
            return await running.http.post("/v1/embeddings", json={"input": [text, "w2"]}, headers=headers)

        first, num_steps = await send("w1"), len(running.worker.devices)
        openai.types.CreateEmbeddingResponse.model_validate(first.json())
        again = await send("w1")
        assert first.json() == again.json() and first.json()["id"] == "mine"
        assert len(running.worker.devices) == num_steps
        other = await send("w3")
        assert (other.status_code, other.json()["error"]["code"]) == (409, "REQUEST_ID_CONFLICT")


async def test_a_gateway_brings_its_answers_to_the_next_scheduler(tmp_path: Path, sockets: str) -> None:
    async with services(tmp_path, sockets, Task.EMBED) as running:
        spec = inference_pb2.PoolingSpec(request_id="mine")
        first = await running.embed(TEXTS[:8], spec=spec)
        await running.scheduler.stop()
        await until(lambda: not running.gateway.generation.is_ready())
        await running.start_scheduler()
        await until(running.gateway.generation.is_ready)
        num_epochs = len(running.worker.devices)
        running.stub = await running.connect(await running.start_gateway())
        # Nothing is computed for it.
        running.worker.refuse_next = "it was computed again"
        assert await running.embed(TEXTS[:8], spec=spec) == first
        assert len(running.worker.devices) == num_epochs
        running.worker.refuse_next = ""


WRONG: list[tuple[str, dict[str, Any], int, str, str | None]] = [
    ("/v1/embeddings", {"input": ""}, 400, "FIELD_INVALID", "input[0]"),
    ("/v1/embeddings", {"input": ["w1", ""]}, 400, "FIELD_INVALID", "input[1]"),
    ("/v1/embeddings", {"input": []}, 400, "FIELD_INVALID", None),
    ("/v1/embeddings", {"input": ["w1"] * 2049}, 400, "FIELD_INVALID", "input"),
    ("/v1/embeddings", {"input": [[1, 10**6]]}, 400, "FIELD_INVALID", "input[0]"),
    ("/v1/embeddings", {"input": "w1 " * 5000}, 400, "context_length_exceeded", "input[0]"),
    ("/v1/embeddings", {"input": "w1", "dimensions": 0}, 400, "FIELD_INVALID", "dimensions"),
    ("/v1/embeddings", {"input": "w1", "model": "other"}, 404, "MODEL_NOT_FOUND", "model"),
    ("/v1/embeddings", {"input": "w1", "prompt_name": "other"}, 400, "FIELD_INVALID", "prompt_name"),
    ("/v1/embeddings", {"input": "w1", "priority": 2**31}, 400, "FIELD_INVALID", "priority"),
    ("/v1/embeddings", {"input": "w1", "truncate_prompt_tokens": 0}, 400, "FIELD_INVALID", "truncate_prompt_tokens"),
    ("/v1/embeddings", {"input": "w1", "request_id": "/"}, 400, "FIELD_INVALID", "request_id"),
    ("/v1/embeddings", {"input": "\ud800"}, 400, "FIELD_INVALID", None),
    ("/v1/rerank", {"query": "w1", "documents": ["w2"], "top_n": 0}, 400, "FIELD_INVALID", "top_n"),
    ("/v1/rerank", {"query": "w1", "documents": ["w2"], "max_tokens_per_doc": 3}, 400, "UNSUPPORTED_PARAMETER", None),
    ("/score", {"text_1": ["w1", "w2"], "text_2": ["w1", "w2", "w3"]}, 400, "FIELD_INVALID", "text_1"),
    ("/classify", {"input": "w1"}, 412, "FEATURE_DISABLED", None),
    ("/v1/completions", {"prompt": "w1"}, 412, "FEATURE_DISABLED", None),
]


async def test_errors_by_the_one_table(tmp_path: Path, sockets: str) -> None:
    async with services(tmp_path, sockets, Task.EMBED) as running:
        for path, body, status, code, parameter in WRONG:
            # As ASCII: a text may have half a surrogate pair.
            answer = await running.http.post(path, content=json.dumps(body), headers=JSON)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (status, code), (path, body, error)
            assert parameter in (None, error["param"]), (path, body, error)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/score", "/classify"])
async def test_a_model_that_generates_makes_no_numbers(tmp_path: Path, sockets: str, path: str) -> None:
    async with services(tmp_path, sockets, Task.GENERATE) as running:
        bodies = {"/v1/rerank": {"query": "w1", "documents": ["w2"]}, "/v1/score": {"text_1": "w1", "text_2": "w2"}}
        answer = await running.http.post(path, json=bodies.get(path, {"input": "w1"}))
        assert (answer.status_code, answer.json()["error"]["code"]) == (412, "FEATURE_DISABLED")
        assert "--task" in answer.json()["error"]["message"]


async def test_a_call_has_one_line_in_the_log_and_counts_each_input(
    tmp_path: Path, sockets: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with services(tmp_path, sockets, Task.EMBED) as running:
        with caplog.at_level("INFO"):
            await running.embed(["w1 w2", "w3", "w4"])
            with pytest.raises(grpc.aio.AioRpcError):
                await running.embed([])
        values = (await running.http.get("/metrics")).text.splitlines()
    finished, refused = (
        [record.fields for record in caplog.records if record.message == f"request {end}"]  # type: ignore[attr-defined]
        for end in ("finished", "refused")
    )
    assert [(each["num_prompt_tokens"], each["num_completion_tokens"]) for each in finished] == [(10, 0)]
    assert finished[0]["method"].endswith("/Embed")
    assert [each["fields"] for each in refused] == ["inputs"]
    assert {"blockyard_requests_total 3.0", 'blockyard_finished_requests_total{result="whole"} 3.0'} <= {*values}
    assert "blockyard_request_prompt_tokens_sum 10.0" in values
    assert "blockyard_output_tokens_total 0.0" in values


async def test_the_program_writes_numbers_and_nothing_else(
    tmp_path: Path, sockets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def out(*arguments: str) -> list[str]:
        target = f"127.0.0.1:{running.gateway.grpc_port}"
        code = await asyncio.to_thread(run, *arguments, "--target", target)
        told = capsys.readouterr()
        assert (code, told.err) == (0, "")
        return told.out.splitlines()

    async with services(tmp_path, sockets, Task.EMBED) as running:
        first, second = map(json.loads, await out("embed", "w1 w2", "w3", "--prompt-name", "query"))
        assert (len(first), first != second) == (NUM_NUMBERS, True)
        assert len(json.loads(*await out("embed", "w3", "--dimensions", "3"))) == 3
        assert json.loads(*await out("embed", "find: w3")) == second
        lines = [line.split("\t") for line in await out("score", "w1", "w2", "w1", "w3 w4")]
        assert {document for _, document in lines} == {"w2", "w1", "w3 w4"}
        assert [float(told) for told, _ in lines] == sorted((float(told) for told, _ in lines), reverse=True)
        assert await asyncio.to_thread(run, "classify", "w1", "--target", f"127.0.0.1:{running.gateway.grpc_port}") == 1
        assert "embed" in capsys.readouterr().err
    labels = tmp_path / "labels"
    labels.mkdir()
    async with services(labels, sockets, Task.CLASSIFY) as running:
        lines = [line.split("\t") for line in await out("classify", "w1", "w2")]
        assert [0 < float(told) <= 1 and label in LABELS.values() for told, label in lines] == [True, True]
