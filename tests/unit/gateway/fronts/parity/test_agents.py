"""The APIs of agents beside the chat of the OpenAI API: the same asked, told and refused, over one gateway."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from blockyard.errors import TABLE, BlockyardError, Reason
from blockyard.gateway.v1 import state_pb2
from gateway.text.tokenizer_files import load_tokenizer
from tests.kit.fakes.fake_scheduler import FakeScheduler, scripted
from tests.unit.gateway.fronts.openai.serving import serve_openai
from tests.unit.gateway.fronts.parity.agents import (
    APIS,
    CHAT,
    FEATURES,
    MESSAGES,
    RESPONSES,
    RULES,
    TEMPLATE,
    Api,
    told_by,
    whole_of_stream,
)
from tests.unit.gateway.harness import DEMO_MODEL, END_OF_TURN, ids_of, serving

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from blockyard.contract.scheduling import Submission


CALL = '<think>Hm.</think>I read.<tool_call>{"name": "read", "arguments": {"path": "b"}}</tool_call>'
ANSWERS = {"stop": "<think>Hm.</think>Done.", "length": "word " * 64, "calls": CALL}


class EveryRequest(dict[str, BlockyardError]):
    """An error for requests of any name."""

    error: BlockyardError

    def __contains__(self, name: object) -> bool:
        return True

    def __getitem__(self, name: str) -> BlockyardError:
        return self.error


class Gateway:
    """A gateway whose model speaks a dialect, on a scheduler that answers a text."""

    def __init__(self, scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
        self.scheduler = scheduler
        self.http = http

    async def post(self, api: Api, **fields: Any) -> httpx.Response:
        return await self.http.post(api.path, json=api.body | fields)


@asynccontextmanager
async def gateway_that_answers(text: str) -> AsyncGenerator[Gateway, None]:
    tokenizer = load_tokenizer(DEMO_MODEL, chat_template_file=TEMPLATE)
    async with (
        FakeScheduler(script=scripted(*ids_of(text), then=END_OF_TURN)) as scheduler,
        serving(scheduler, tokenizer=tokenizer) as front,
        serve_openai(front.service) as url,
        httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http,
    ):
        yield Gateway(scheduler, http)


def asked_of(added: Submission) -> tuple[Submission, bytes]:
    """What a request asks of the scheduler and of other gateways, but for its name, its seed and its front's state."""
    state = state_pb2.RequestState.FromString(added.gateway_state)
    state.spec.ClearField("request_id")
    state.spec.sampling.ClearField("seed")
    state.ClearField("front_state")
    sampling = replace(added.sampling, seed=None)
    asked = replace(added, sampling=sampling, request_id="", digest=b"", gateway_state=b"", trace_context=None)
    return asked, state.SerializeToString(deterministic=True)


async def test_each_api_asks_the_same() -> None:
    async with gateway_that_answers("Done.") as gateway:
        for api in APIS:
            assert (await gateway.post(api)).status_code == 200
        first, *others = map(asked_of, gateway.scheduler.added)
    assert others == [first, first]


async def test_each_api_asks_the_same_of_a_feature_that_it_has() -> None:
    async with gateway_that_answers("Done.") as gateway:
        added = gateway.scheduler.added
        assert (await gateway.post(CHAT)).status_code == 200
        plain = asked_of(added[0])
        for name, columns in FEATURES.items():
            told: list[tuple[Submission, bytes]] = []
            for api, fields in zip(APIS, columns, strict=True):
                if fields is not None:
                    response = await gateway.post(api, **fields)
                    assert response.status_code == 200, (name, api.path, response.text)
                    told.append(asked_of(added[-1]))
            assert len(told) > 1, name
            assert told == told[:1] * len(told), name
            assert told[0] != plain, name


async def test_the_body_of_each_api_is_tokenized_as_it_is_answered() -> None:
    async with gateway_that_answers("Done.") as gateway:
        for api in APIS:
            headers = {"anthropic-version": "2023-06-01"} if api is MESSAGES else {}
            assert (await gateway.post(api)).status_code == 200
            told = await gateway.http.post("/tokenize", json=api.body, headers=headers)
            assert told.status_code == 200, told.text
            assert told.json()["tokens"] == list(gateway.scheduler.added[-1].prompt_token_ids), api.path
            assert told.json()["count"] == len(told.json()["tokens"])
            spelled = await gateway.http.post("/tokenize", json=api.body | {"return_token_strs": True}, headers=headers)
            assert len(spelled.json()["token_strs"]) == told.json()["count"]


async def test_a_body_that_is_tokenized_is_refused_in_the_form_of_its_api() -> None:
    num_refused = 0
    async with gateway_that_answers("Done.") as gateway:
        for rule in RULES.values():
            for api, fields in zip(APIS, rule.bodies, strict=True):
                headers = {"anthropic-version": "2023-06-01"} if api is MESSAGES else {}
                told = await gateway.http.post("/tokenize", json=api.body | (fields or {}), headers=headers)
                # What does not concern the prompt is not checked.
                if told.status_code != 200:
                    answered = await gateway.post(api, **(fields or {}))
                    assert (told.status_code, told.json()) == (answered.status_code, answered.json()), (rule, api.path)
                    num_refused += 1
    assert num_refused > len(RULES)


async def test_each_api_refuses_the_same_at_its_own_place() -> None:
    async with gateway_that_answers("Done.") as gateway:
        for name, rule in RULES.items():
            for api, fields, place in zip(APIS, rule.bodies, rule.places, strict=True):
                refusal = await gateway.post(api, **fields or {})
                error = refusal.json()["error"]
                assert (refusal.status_code, error["reason"]) == (TABLE[rule.reason].http_status, str(rule.reason)), (
                    name
                )
                told = [(each["param"], each["code"]) for each in error["violations"]]
                assert told == [(place, str(rule.reason))], (name, api.path)
        assert not gateway.scheduler.added


@pytest.mark.parametrize("ending", ANSWERS)
async def test_each_api_tells_the_same_whole_and_streamed(ending: str) -> None:
    async with gateway_that_answers(ANSWERS[ending]) as gateway:
        whole = {api.path: told_by(api, (await gateway.post(api)).json()) for api in APIS}
        streamed = {
            api.path: told_by(api, whole_of_stream(api, (await gateway.post(api, stream=True)).text))
            for api in (MESSAGES, RESPONSES)
        }
    expected = whole[CHAT.path]
    assert expected.calls == ((("read", {"path": "b"}),) if ending == "calls" else ())
    for api in APIS:
        assert whole[api.path] == expected._replace(ending=api.endings[ending]), api.path
        assert streamed.get(api.path, whole[api.path]) == whole[api.path]


async def test_each_api_tells_the_error_of_the_scheduler() -> None:
    async with gateway_that_answers("Done.") as gateway:
        gateway.scheduler.refusals = refusals = EveryRequest()
        for reason in Reason:
            refusals.error = BlockyardError(reason, "so it is", retry_after_seconds=1.5)
            for api in APIS:
                refusal = await gateway.post(api)
                error = refusal.json()["error"]
                assert (refusal.status_code, error["reason"]) == (TABLE[reason].http_status, str(reason)), api.path
                assert "so it is" in error["message"]
                assert refusal.headers["retry-after-ms"] == "1500"


async def test_an_error_names_its_request_as_the_log_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with gateway_that_answers("Done.") as gateway:
        for api in APIS:
            name = "request-id" if api is MESSAGES else "x-request-id"
            gateway.scheduler.refusals = {}
            request_id = (await gateway.post(api)).headers[name]
            refused = await gateway.post(api, top_p=7.0)
            gateway.scheduler.refusals = refusals = EveryRequest()
            refusals.error = BlockyardError(Reason.NOT_FINITE, "so it is")
            failed = await gateway.post(api)
            assert (refused.status_code, failed.status_code) == (400, 500)
            named = [request_id, refused.headers[name], failed.headers[name]]
            records = [record for record in caplog.records if record.name == "gateway.observe.request_log"]
            logged = [record.fields["request_id"] for record in records[-3:]]  # type: ignore[attr-defined]
            # One prompt of several has its number behind the call's name.
            assert [each.removesuffix("-0") for each in logged] == named, api.path
            assert len(set(named)) == 3
            # Nothing came of it that could be named.
            assert name not in (await gateway.post(api, temperature="hot")).headers
        for request_id in ("a\r\nb: c", "x" * 300):
            assert "x-request-id" not in (await gateway.post(CHAT, request_id=request_id)).headers
