"""The page in a headless Chromium, on the three real services. Needs Debian's `chromium`."""

from __future__ import annotations

import asyncio
import signal
import socket
from typing import TYPE_CHECKING, Any

import pytest

from blockyard import AsyncClient, Client
from blockyard.admin.v1 import admin_pb2
from blockyard.common.v1 import status_pb2
from blockyard.configuration import ModelSettings, PublicSettings, SecuritySettings
from blockyard.contract.events import Delta, Recovered, TokenLogprobs
from blockyard.security.keys import Key, add_key, digest, make_secret
from blockyard.service import faults
from gateway.config import GatewayConfiguration, ServiceSettings
from gateway.fronts.openai.app import make_app
from gateway.fronts.page.routes import StatusBoard, add_page
from gateway.request import ReturnedLogprob
from gateway.server import Server
from tests.kit.chaos.model_switches import switched_system
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.kit.processes.browser import Browser
from tests.kit.processes.status import scheduler_status, state_of
from tests.kit.processes.system import ROOT, System
from tests.kit.waiting import wait_until
from tests.unit.gateway.fronts.openai.scripted import (
    ARGUMENTS,
    SAID,
    THOUGHT,
    ScriptedService,
    accepted,
    calling,
    finished,
)
from tests.unit.gateway.fronts.openai.serving import serve
from tests.unit.gateway.harness import demo_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gateway.request import GenerationRequest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

DEMO = ROOT / "models" / "demo"
FLAGS = ["--dtype", "float32", "--num-device-blocks", "200", "--num-host-blocks", "50"]
PROMPT = "def read_lines(path):\n"
# After so many steps of its first answer a worker halts, where it is to.
HALT = 40
WELL: dict[str, Any] = {"console": [], "errors": [], "elsewhere": []}
ATTACKS = (
    "<script>owned.push('script')</script>",
    "<img src=x onerror=\"owned.push('img')\">",
    "<svg onload=\"owned.push('svg')\">",
    "<iframe srcdoc=\"<script>parent.owned.push('frame')</script>\"></iframe>",
    "javascript:owned.push('url')",
    "</div></body>\u202e\0{{constructor.constructor('owned.push(1)')()}}",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    return Browser(tmp_path_factory.mktemp("browser") / "environment")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The three services on the demo model, the gateway's port chosen so that it can come back there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    system = System(DEMO, tmp_path_factory.mktemp("page"), FLAGS, gateway_flags=["--http-port", port])
    with system:
        yield system


def well(told: dict[str, Any]) -> bool:
    return {name: told[name] for name in WELL} == WELL


def look_at_halted(
    browser: Browser,
    demo: System,
    scenario: str,
    when_halted: Callable[[], object] = lambda: None,
    before_going_on: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Looks at a scenario that asks for the worker to halt in the middle of its first answer, and to go on."""
    demo.services["worker"].stop()
    demo.next_faults["worker"] = f"{faults.AFTER_ANSWER}:hang@{HALT}"
    worker = demo.start_service("worker")
    worker.wait_for_log("cache ready")
    wait_until(lambda: scheduler_status(demo).replicas[0].ready)
    with browser.begin(scenario, demo.http_url) as looking:
        try:
            assert browser.hear(looking) == "halt"
            wait_until(lambda: state_of(worker.process.pid) == "T")
            when_halted()
            browser.answer(looking)
            assert browser.hear(looking) == "go on"
            before_going_on()
        finally:
            worker.process.send_signal(signal.SIGCONT)
        browser.answer(looking)
        told = browser.end(looking)
    demo.wait_until_ready()
    return told


def test_a_prompt_streams_and_charts_move(browser: Browser, demo: System) -> None:
    told = browser.look("completion", demo.http_url)
    assert well(told), told
    with Client(demo.grpc_target) as client:
        truth = client.generate(PROMPT, temperature=1.0, seed=3, max_tokens=300, n=2)
    assert told["answers"] == [choice.text for choice in truth.choices]
    assert told["tokens"] > 20
    assert told["model"] == "demo" and '"model":"demo"' in told["command"]
    assert "tokens/s" in told["facts"] and "prompt tokens" in told["facts"]
    assert len(told["card"]) >= 5 and all("%" in row for row in told["card"])
    assert told["current"].strip() and "%" in told["announced"]
    assert told["card_is_hidden"]
    assert len(told["replicas"]) == 1 and "ready" in told["replicas"][0]
    before, after = ({each["title"]: each for each in told[name]} for name in ("before", "after"))
    assert len(after) == 6
    for title, chart in after.items():
        assert chart["drawn"] != before[title]["drawn"], f"{title} did not move"
    assert "p95 –" not in after["Time to first token"]["told"]


def test_a_chat_goes_on(browser: Browser, demo: System) -> None:
    told = browser.look("chat", demo.http_url)
    assert well(told), told
    asked, answered, asked_next, _ = told["turns"]
    assert (asked, asked_next) == ("What does\nos.path.join do?", "And os.path.split?")
    assert told["announced"].startswith("Answer: ")
    first, second, again, changed = (body["messages"] for body in told["bodies"])
    assert first == [{"role": "user", "content": asked}]
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[2]["content"] == asked_next
    assert again == second, "another answer to the same"
    assert told["again"][:3] == [asked, answered, asked_next]
    assert (told["edited"], told["not_edited"]) == (asked, "")
    assert changed == [{"role": "user", "content": "What is a generator?"}]
    assert told["changed"][0] == "What is a generator?" and len(told["changed"]) == 2
    assert told["reloaded"] == told["changed"]
    assert told["cleared"] == []


def test_a_reload_reads_on_with_the_answer(browser: Browser, demo: System) -> None:
    told = look_at_halted(browser, demo, "reload")
    assert told["errors"] == told["elsewhere"] == []
    # Chromium itself writes down that an answer was no success.
    assert all("404 (Not Found)" in line for line in told["console"]), told["console"]
    assert told["posts"] == 1, "it was asked once"
    assert told["marks"] == 0 and len(told["read_on"]) == 2
    assert told["read_on"][1]
    assert told["seed"] == "3"
    assert told["forgotten"] == ["What is a class?", "half an"]
    assert "not whole" in told["mark"][0]


def test_a_conversation_follows_its_end_until_somebody_scrolls(browser: Browser) -> None:
    lines = "".join(f"- line {number} of this answer\n" for number in range(80))
    told = look_at_answer(browser, "follow", lines)
    assert well(told), told
    assert abs(told["followed"]) <= 1 and abs(told["returned"]) <= 1
    assert told["stayed"] == 0
    foot, panel = told["foot"]
    assert panel - 40 < foot <= panel <= 500, "the box for the message is at the foot of the window"


def test_status_is_asked_for_once_a_second_while_somebody_looks(browser: Browser, demo: System) -> None:
    told = browser.look("looking", demo.http_url)
    assert well(told), told
    assert told["hidden"] == 0
    # A timer may come late, and never early.
    assert min(told["gaps"]) > 950, told["gaps"]
    assert told["asked"] == [f"{demo.http_url}/status"]


def test_a_late_list_of_models_moves_nobody(browser: Browser, demo: System) -> None:
    told = browser.look("early", demo.http_url)
    assert well(told), told
    assert told["untouched, said"] == told["touched, said"] == "connecting"
    assert told["untouched"] == ["chat", "0.7", "demo"]
    assert told["touched"] == ["completion", "0.1", "demo"]


def test_what_is_done_is_shown_though_no_frame_comes(browser: Browser) -> None:
    text = "".join(f"word {number} " for number in range(500)).strip()
    told = look_at_answer(browser, "unpainted", text)
    assert well(told), told
    assert told["chat"] == ["Go.", text]
    assert told["completion"] == [text]


def test_stop_ends_the_request(browser: Browser, demo: System) -> None:
    with Client(demo.grpc_target) as client:
        whole = client.generate(PROMPT, temperature=1.0, seed=1, max_tokens=200, n=8).usage.num_completion_tokens
    before = scheduler_status(demo).num_completion_tokens
    told = look_at_halted(browser, demo, "stop")
    assert (told["notice"], told["grew_on"]) == ("Stopped.", False)
    assert well(told), told
    assert scheduler_status(demo).num_completion_tokens - before < whole, "it was answered to its end"


def test_a_refusal_names_its_fields(browser: Browser, demo: System) -> None:
    told = browser.look("refusal", demo.http_url)
    assert "FIELD_INVALID" in told["problem"] and "top_p" in told["problem"]
    assert sorted(told["marked"]) == ["temperature", "top_p"]
    assert told["marked_in_chat"] == ["schema"]
    # Chromium itself writes down that an answer was no success.
    assert all("400 (Bad Request)" in line for line in told["console"])
    assert told["errors"] == told["elsewhere"] == []


def test_an_answer_outlives_its_gateway(browser: Browser, demo: System) -> None:
    with Client(demo.grpc_target) as client:
        truth = client.generate(PROMPT, temperature=1.0, seed=7, max_tokens=200, n=4)
    assert truth.usage.num_completion_tokens > 4 * HALT, "it is over before anything can be killed"

    def kill_gateway() -> None:
        demo.services["gateway"].process.kill()
        demo.services["gateway"].wait()

    told = look_at_halted(browser, demo, "outlive", kill_gateway, lambda: demo.start_service("gateway"))
    assert told["answers"] == [choice.text for choice in truth.choices]
    assert "1 reconnect" in told["facts"]
    assert told["errors"] == told["elsewhere"] == []
    # Chromium itself writes down that nobody answered.
    assert all("net::ERR_" in line or "503" in line for line in told["console"]), told["console"]


def attacking(request: GenerationRequest) -> list[Any]:
    steps: list[Any] = [accepted(request)]
    num_bytes = 0
    for number, text in enumerate(ATTACKS):
        raw = text.encode()
        num_bytes += len(raw)
        token = ReturnedLogprob(number, text, -0.5, 1, raw)
        other = ReturnedLogprob(99, ATTACKS[1], -1.0, 2, ATTACKS[1].encode())
        logprobs = (TokenLogprobs(token, (token, other)),)
        steps.append(Delta(0, text, (number,), number + 1, num_bytes, logprobs))
    return [*steps, Recovered("lost", 1, True), finished(len(ATTACKS), matched=ATTACKS[0])]


async def test_output_that_attacks_stays_text(browser: Browser) -> None:
    service = ScriptedService()
    service.script = attacking
    service.model_name = ATTACKS[0]

    async def ask(_model: str) -> admin_pb2.GetStatusResponse:
        response = admin_pb2.GetStatusResponse()
        response.gateway.message, response.gateway.version = ATTACKS[1], ATTACKS[0]
        replica = response.scheduler.replicas.add()
        replica.workers.add(address=ATTACKS[1], device=ATTACKS[2], message=ATTACKS[0])
        response.scheduler.recoveries.add(cause=ATTACKS[1])
        return response

    app = make_app(service)  # type: ignore[arg-type]
    add_page(app, StatusBoard(ask))
    async with serve(app) as url:
        told = await asyncio.to_thread(browser.look, "hostile", url)
    assert told["text"] == "".join(ATTACKS)
    assert told["owned"] == []
    assert not {"script", "img", "svg", "iframe"} & set(told["elements"])
    assert well(told), told


def look_at_answer(browser: Browser, scenario: str, text: str) -> dict[str, Any]:
    """What is seen of a model that always answers with this text, in small pieces."""
    return look_at_script(browser, scenario, lambda request: pieces(request, text))


def look_at_script(browser: Browser, scenario: str, script: Any) -> dict[str, Any]:
    """What is seen of a model that follows a script."""
    service = ScriptedService()
    service.script = script

    async def ask(_model: str) -> admin_pb2.GetStatusResponse:
        response = admin_pb2.GetStatusResponse()
        response.gateway.ready = True
        return response

    async def look() -> dict[str, Any]:
        app = make_app(service)  # type: ignore[arg-type]
        add_page(app, StatusBoard(ask))
        async with serve(app) as url:
            return await asyncio.to_thread(browser.look, scenario, url)

    return asyncio.run(look())


def pieces(request: GenerationRequest, text: str, size: int = 200) -> list[Any]:
    steps: list[Any] = [accepted(request)]
    for number, start in enumerate(range(0, len(text), size)):
        piece = text[start : start + size]
        steps.append(Delta(0, piece, (number,), number + 1, len(text[: start + size].encode())))
    return [*steps, finished(len(steps) - 1)]


def test_reasoning_and_calls_of_tools_are_shown_and_kept(browser: Browser) -> None:
    told = look_at_script(browser, "tools", calling)
    assert well(told), told
    assert told["parts"] == [[[THOUGHT], [SAID], [f"read{ARGUMENTS}", "list{}"]]] * 2
    assert told["asked"]["tools"] == [{"type": "function", "function": {"name": "read", "parameters": {}}}]
    assert told["asked"]["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_markdown_that_attacks_is_text_and_the_page_stays_quick(browser: Browser) -> None:
    code = "print('<b>copied</b>')"
    text = "\n\n".join(
        (
            f"```py\n{code}\n```",
            *ATTACKS[:-1],
            "[a](javascript:owned.push(1)) [b](data:text/html,x) ![c](https://elsewhere.test/picture.png)",
            "<javascript:owned.push(2)> [d](https://elsewhere.test/ 'title')",
            "> " * 500 + "deep",
            "".join(f"{'  ' * depth}- deep\n" for depth in range(200)),
            "a" * 100_000,
            "*a* [" * 10_000,
            "```\nnever closed " + ATTACKS[0],
        )
    )
    told = look_at_answer(browser, "markdown", text)
    assert well(told), told
    assert told["owned"] == []
    assert not {"script", "img", "svg", "iframe", "input"} & set(told["elements"])
    assert all(attack in told["text"] for attack in ATTACKS[:-1])
    assert {tuple(link) for link in told["links"]} == {
        (f"https://elsewhere.test/{path}", "noopener noreferrer", "_blank") for path in ("picture.png", "")
    }
    assert told["code"] == code
    assert told["copied"] == [code, text]


LONG_NAME = "organisation-with-a-long-name/" + "model-of-many-words-" * 4
LONG_ADDRESS = "worker-0.workers.blockyard.svc.cluster.local:50061"


async def ask_for_many(_model: str) -> admin_pb2.GetStatusResponse:
    """Tells of a model in each state, and of three replicas of two workers each."""
    response = admin_pb2.GetStatusResponse(gateway=admin_pb2.GatewayStatus(version="1.0", ready=True))
    for state in admin_pb2.ModelState.values()[1:]:
        name = f"{LONG_NAME}{state}"
        response.models.add(name=name, state=state, starts_on_demand=True, num_requests=1, message="x" * 200)
    for number in range(3):
        replica = response.scheduler.replicas.add(replica_id=number, epoch=12_345, num_running_sequences=1234)
        replica.device_blocks.num_blocks = 1_234_567
        for _ in range(2):
            replica.workers.add(
                address=LONG_ADDRESS, device="NVIDIA H200", state=status_pb2.WORKER_STATE_DEVICE_READY, message="x" * 90
            )
    return response


async def test_models_and_replicas_fit_their_cards(browser: Browser) -> None:
    app = make_app(ScriptedService())  # type: ignore[arg-type]
    add_page(app, StatusBoard(ask_for_many))
    async with serve(app) as url:
        told = await asyncio.to_thread(browser.look, "fits", url)
    assert well(told), told
    for width in ("1280", "390"):
        seen = told[width]
        assert seen["too_wide"] == [], width
        assert seen["violations"] == [], width
        assert len(seen["models"]) == 5 and seen["loads"] == 1
        for words, row in zip(
            ("loaded", "loading", "not loaded", "cannot be loaded", "not ready"), seen["models"], strict=True
        ):
            assert f"\n{words}\n" in row and "1 request" in row
        assert LONG_ADDRESS in seen["replicas"] and "epoch 12,345" in seen["replicas"]


async def test_a_model_is_chosen_and_loaded(browser: Browser, tmp_path: Path) -> None:
    async with switched_system(tmp_path / "log") as switched:
        told = await asyncio.to_thread(browser.look, "models", f"http://{switched.system.endpoints.http}", "qwen2")
        async with AsyncClient(switched.system.endpoints.local) as client:
            truth = await client.generate(PROMPT, model="qwen2", max_tokens=8, temperature=0.0)
    assert well(told), told
    assert told["before"] == ["not loaded"] * 3
    assert told["after"] == ["not loaded", "loaded", "not loaded"]
    assert told["answers"] == [truth.text]
    assert switched.loads == {"qwen2": 1}


async def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Browser, tmp_path: Path) -> None:
    secret = make_secret()
    add_key(tmp_path / "keys", Key(name="page", sha256=digest(secret), tenant="team"))
    async with FakeScheduler(model_digest=demo_tokenizer().model_digest) as scheduler:
        gateway = Server(
            GatewayConfiguration(
                model=ModelSettings(model=str(DEMO)),
                public=PublicSettings(grpc_port=0, http_port=0, admin_port=0),
                security=SecuritySettings(api_keys_file=str(tmp_path / "keys")),
                service=ServiceSettings(scheduler_address=scheduler.address),
            )
        )
        await gateway.start()
        try:
            url = f"http://127.0.0.1:{gateway.http_port}"
            told = await asyncio.to_thread(browser.look, "key", url, secret)
        finally:
            await gateway.stop()
    assert "UNAUTHENTICATED" in told["refused"] and told["key_is_shown"]
    assert told["tokens"] > 0
    assert secret not in told["command"] and "$BLOCKYARD_API_KEY" in told["command"]
    of_tab, kept, cookies = told["stored"]
    assert secret in of_tab and secret not in "".join(kept) and cookies == ""
    assert told["errors"] == told["elsewhere"] == []
    # Chromium itself writes down that an answer was no success.
    assert all("401 (Unauthorized)" in line for line in told["console"]), told["console"]


def test_everybody_can_use_it(browser: Browser, demo: System) -> None:
    told = browser.look("access", demo.http_url)
    assert told["violations"] == {"light": [], "dark": []}
    assert all(overflow <= 0 for overflow in told["overflow"].values()), told["overflow"]
