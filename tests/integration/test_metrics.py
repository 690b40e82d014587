"""The metrics of the three real services after a run with a preemption, a cancel, refusals, and a killed worker.

What is counted is held against what the clients saw: each token once, also those that had to be computed again.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import httpx
import pytest

from blockyard import AsyncClient
from blockyard.contract.events import Accepted, Delta, Finished, Recovered
from blockyard.errors import BlockyardError, Reason
from blockyard.service import faults
from blockyard.service.metrics import CERTIFICATE_EXPIRY, COMMON, PROCESS
from gateway.observe.metrics import CATALOGUE as GATEWAY
from gateway.observe.metrics import INVALID_TOOL_CALLS
from scheduler_service.catalogue import CATALOGUE as SCHEDULER
from scheduler_service.catalogue import LORA_PASSED_SECONDS
from scheduler_service.replicas.steps.steps_in_flight import MAX_STEPS_IN_FLIGHT
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.processes.scrape import Scrape
from tests.kit.processes.system import System
from worker_service.observe.metrics import CATALOGUE as WORKER
from worker_service.observe.metrics import SAVE_SECONDS, SAVES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from pathlib import Path

    from blockyard.service.metrics import Metric

# Few blocks, so that long answers take them from each other; few places to wait in, so that some are sent away; and
# patience, so that on a busy machine nobody is taken for dead who is not.
SCHEDULER_FLAGS = [
    *("--dtype", "float32", "--block-size", "16", "--num-device-blocks", "40", "--num-host-blocks", "8"),
    *("--max-num-seqs", "6", "--max-waiting-requests", "8", "--scheduler-metrics-port", "0"),
    *("--step-deadline-seconds", "30"),
]
NUM_TOKENS = 300
PROMPTS = [[5 + number, 6, 7 + 2 * number, *range(20, 30)] for number in range(8)]


class Watched:
    """A system, and what its services tell."""

    def __init__(self, system: System) -> None:
        self.system = system

    def _address(self, service: str, pattern: str) -> str:
        told = self.system.services[service].wait_for_log(rf"listening.* {pattern}").group(1)
        return told if ":" in told else f"127.0.0.1:{told}"

    def scrape(self, service: str) -> Scrape:
        patterns = {
            "gateway": r"metrics=(\S+)",
            "scheduler": r"metrics_address=(\S+)",
            "worker": r"metrics_port=(\d+)",
        }
        return Scrape.get(self._address(service, patterns[service]))

    async def until(self, service: str, condition: Callable[[Scrape], bool]) -> Scrape:
        """Scrapes until what is told holds."""
        async with asyncio.timeout(30):
            while not condition(seen := await asyncio.to_thread(self.scrape, service)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return seen


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    with make_system(tmp_path) as system:
        yield Watched(system)


def make_system(folder: Path) -> System:
    worker = ["--worker-metrics-port", "0", "--num-threads", "1"]
    gateway = ["--gateway-metrics-port", "0", "--vllm-metric-names"]
    return System(tiny_model("llama"), folder, SCHEDULER_FLAGS, worker, gateway)


class Seen:
    """What one client saw of its request."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_replayed = 0
        self.refusal: Reason | None = None


async def follow(client: AsyncClient, number: int, seen: Seen) -> None:
    options = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0, "request_id": f"r{number}"}
    async for event in client.stream(PROMPTS[number], **options):  # type: ignore[arg-type]
        if isinstance(event, Delta):
            seen.num_tokens = event.num_tokens
        elif isinstance(event, Finished):
            seen.num_tokens = event.usage.num_completion_tokens
        elif isinstance(event, Recovered):
            seen.num_replayed += event.num_replayed_tokens


async def flood(client: AsyncClient, seen: Seen) -> None:
    """One of too many at once; whoever is sent away does not come again."""
    try:
        answer = await client.generate([9, 8, 7], max_tokens=4, ignore_eos=True)
        seen.num_tokens = answer.usage.num_completion_tokens
    except BlockyardError as error:
        seen.refusal = error.reason


def missing(scrape: Scrape, catalogue: Iterable[Metric]) -> list[str]:
    """What is not told at all, or without any value."""
    # Nobody shows a certificate, saves weights or calls a tool here, and no adapter waits for a slot.
    elsewhere = (CERTIFICATE_EXPIRY, LORA_PASSED_SECONDS, SAVES, SAVE_SECONDS, INVALID_TOOL_CALLS)
    told = [metric for metric in (*COMMON, *catalogue, *PROCESS) if metric not in elsewhere]
    return [
        metric.name
        for metric in told
        if not scrape.has(metric) or not (scrape.labels(metric.name) or scrape.labels(f"{metric.name}_count"))
    ]


@pytest.mark.timeout(180)
async def test_what_is_told_is_what_happened(watched: Watched) -> None:
    streams = [Seen() for _ in PROMPTS]
    flooded = [Seen() for _ in range(40)]
    async with (
        AsyncClient(watched.system.grpc_target) as client,
        httpx.AsyncClient(base_url=watched.system.http_url, timeout=30, verify=False) as http,
    ):
        following = asyncio.gather(*(follow(client, number, seen) for number, seen in enumerate(streams)))
        await watched.until("scheduler", lambda seen: seen.sum("blockyard_preemptions_total") > 0)
        flooding = asyncio.gather(*(flood(client, seen) for seen in flooded))
        await watched.until("scheduler", lambda seen: seen.sum("blockyard_refused_requests_total") > 0)
        # The worker dies with answers half told, and comes back.
        before = watched.scrape("worker")
        watched.system.services["worker"].stop(signal.SIGKILL)
        watched.system.start_service("worker")
        await asyncio.gather(following, flooding)
        cancelled = client.stream([3, 4, 5], max_tokens=400, ignore_eos=True, request_id="cancelled")
        assert isinstance(await anext(cancelled), Accepted)
        assert isinstance(await anext(cancelled), Delta)
        assert await client.cancel("cancelled") == ["cancelled"]
        with pytest.raises(BlockyardError):
            async for _ in cancelled:
                pass
        wrong = await http.post("/v1/completions", json={"prompt": "a", "temperature": -1})
        assert wrong.status_code == 400
        assert (await http.get("/metrics")).status_code == 200
    scheduler = await watched.until("scheduler", lambda seen: seen.sum("blockyard_steps_in_flight") == 0)
    # Its reading of the scheduler may be a second old.
    gateway = await watched.until("gateway", lambda seen: is_as_idle_as(seen, scheduler))
    worker = watched.scrape("worker")
    assert missing(gateway, GATEWAY) == []
    assert missing(scheduler, SCHEDULER) == []
    assert missing(worker, WORKER) == []
    check_tokens(streams, flooded, gateway, scheduler)
    check_failures(streams, flooded, gateway, scheduler)
    check_steps(before, worker, scheduler)
    check_one_scrape(gateway, scheduler)


def used_share(scheduler: Scrape) -> float:
    used, free = (scheduler.sum("blockyard_blocks", pool="device", state=state) for state in ("used", "free"))
    return used / (used + free)


def is_as_idle_as(gateway: Scrape, scheduler: Scrape) -> bool:
    share = gateway.sum("blockyard_model_kv_usage_ratio")
    is_there = bool(gateway.labels("blockyard_model_requests"))
    return is_there and not gateway.sum("blockyard_model_requests") and share == pytest.approx(used_share(scheduler))


def check_one_scrape(gateway: Scrape, scheduler: Scrape) -> None:
    """What the gateway tells of the scheduler, itself and under vLLM's names, is what the scheduler tells."""
    for state in ("waiting", "running"):
        count = scheduler.sum("blockyard_requests", state=state)
        assert gateway.sum("blockyard_model_requests", state=state) == count
        assert gateway.sum(f"vllm:num_requests_{state}") == count
    assert gateway.sum("blockyard_model_kv_usage_ratio") == pytest.approx(used_share(scheduler))
    queried = scheduler.sum("blockyard_prefix_cache_query_tokens_total")
    assert gateway.sum("blockyard_model_prefix_cache_query_tokens_total") == queried > 0
    found = scheduler.sum("blockyard_prefix_cache_hit_tokens_total")
    assert gateway.sum("vllm:prefix_cache_hits_total") == found
    assert gateway.sum("vllm:num_preemptions_total") == scheduler.sum("blockyard_preemptions_total")


@pytest.mark.timeout(180)
async def test_a_killed_scheduler_costs_no_count(tmp_path: Path) -> None:
    """The gateway goes on counting where it was; the successor tells what it has computed again."""
    streams = [Seen() for _ in PROMPTS[:4]]
    system = make_system(tmp_path)
    # It dies when no answer can be whole yet.
    system.next_faults["scheduler"] = f"{faults.BEFORE_PUBLISH}:{faults.Action.KILL}@{NUM_TOKENS * 2 // 3}"
    with system:
        async with AsyncClient(system.grpc_target) as client:
            following = asyncio.gather(*(follow(client, number, seen) for number, seen in enumerate(streams)))
            assert await asyncio.to_thread(system.services["scheduler"].wait) == -signal.SIGKILL
            system.start_service("scheduler")
            await following
        check_succession(Watched(system), streams)


def check_succession(watched: Watched, streams: list[Seen]) -> None:
    """What all services tell where one scheduler died with all streams, and another one finished them."""
    gateway, scheduler = watched.scrape("gateway"), watched.scrape("scheduler")
    assert [seen.num_tokens for seen in streams] == [NUM_TOKENS] * len(streams)
    assert gateway.sum("blockyard_output_tokens_total") == NUM_TOKENS * len(streams)
    assert gateway.sum("blockyard_requests_total") == len(streams)
    assert gateway.sum("blockyard_finished_requests_total", result="whole") == len(streams)
    assert gateway.sum("blockyard_time_to_first_token_seconds_count") == len(streams)
    assert gateway.sum("blockyard_scheduler_losses_total") == gateway.sum("blockyard_scheduler_attached") == 1
    num_replayed = sum(seen.num_replayed for seen in streams)
    assert scheduler.sum("blockyard_recovered_requests_total", lost="scheduler") == len(streams)
    assert scheduler.sum("blockyard_recomputed_tokens_total", lost="scheduler") == num_replayed > NUM_TOKENS
    # Of the answers the successor has sampled what its predecessor had not, or not told.
    assert scheduler.sum("blockyard_generated_tokens_total") < NUM_TOKENS * (len(streams) - 1)
    assert scheduler.sum("blockyard_prompt_tokens_total") == 0
    assert watched.scrape("worker").sum("blockyard_worker_epoch") == 2


def check_tokens(streams: list[Seen], flooded: list[Seen], gateway: Scrape, scheduler: Scrape) -> None:
    """Each token counts once, though a worker died with some of them and clients left others."""
    assert [seen.num_tokens for seen in streams] == [NUM_TOKENS] * len(streams)
    served = [seen for seen in flooded if seen.refusal is None]
    whole = NUM_TOKENS * len(streams) + 4 * len(served)
    assert gateway.sum("blockyard_request_output_tokens_sum") == whole
    # The cancelled one was told some tokens too, and more were sampled for it.
    assert whole < gateway.sum("blockyard_output_tokens_total") <= scheduler.sum("blockyard_generated_tokens_total")
    assert scheduler.sum("blockyard_generated_tokens_total") <= whole + 400
    num_prompt_tokens = sum(map(len, PROMPTS)) + 3 * len(served) + 3
    assert scheduler.sum("blockyard_prompt_tokens_total") == num_prompt_tokens
    num_whole = len(streams) + len(served)
    assert gateway.sum("blockyard_finished_requests_total", result="whole") == num_whole
    assert gateway.sum("blockyard_finished_sequences_total", reason="length") == num_whole
    assert gateway.sum("blockyard_request_latency_seconds_count") == num_whole
    assert gateway.sum("blockyard_time_to_first_token_seconds_count") == num_whole + 1
    assert gateway.sum("blockyard_live_streams") == gateway.sum("blockyard_live_requests") == 0


def check_failures(streams: list[Seen], flooded: list[Seen], gateway: Scrape, scheduler: Scrape) -> None:
    """Refusals, the cancel and the loss of the worker, each where it belongs."""
    num_refused = sum(seen.refusal is Reason.QUEUE_FULL for seen in flooded)
    assert num_refused == sum(seen.refusal is not None for seen in flooded) > 0
    assert scheduler.sum("blockyard_refused_requests_total", reason="QUEUE_FULL") == num_refused
    assert gateway.sum("blockyard_finished_requests_total", result="QUEUE_FULL") == num_refused
    assert gateway.sum("blockyard_errors_total", api="grpc", reason="QUEUE_FULL") == num_refused
    assert gateway.sum("blockyard_errors_total", api="http", reason="FIELD_INVALID") == 1
    assert gateway.sum("blockyard_errors_total", api="grpc", reason="CLIENT_CANCELLED") == 1
    method = "blockyard.inference.v1.InferenceService/StreamGenerate"
    assert gateway.sum("blockyard_grpc_calls_total", method=method, code="OK") == len(streams + flooded) - num_refused
    assert gateway.sum("blockyard_grpc_calls_total", method=method, code="CANCELLED") == 1
    assert gateway.sum("blockyard_http_requests_total", path="/v1/completions", code="400") == 1
    assert scheduler.sum("blockyard_worker_losses_total", cause="died") == 1
    assert scheduler.sum("blockyard_worker_losses_total") == 1
    assert scheduler.sum("blockyard_recovered_requests_total", lost="worker") > 0
    num_replayed = sum(seen.num_replayed for seen in streams)
    assert scheduler.sum("blockyard_recomputed_tokens_total") == num_replayed > 0
    assert scheduler.sum("blockyard_inexact_recoveries_total") == 0
    assert scheduler.sum("blockyard_cancel_to_free_seconds_count") >= 1
    assert scheduler.sum("blockyard_preemptions_total") > 0
    assert scheduler.sum("blockyard_blocks", state="used") == scheduler.sum("blockyard_requests") == 0


def check_steps(before: Scrape, worker: Scrape, scheduler: Scrape) -> None:
    """The scheduler's steps are those of both of the worker's lives, but for what the first did not answer."""
    assert worker.sum("blockyard_worker_state", state="RUNNING") == 1
    assert worker.sum("blockyard_worker_epoch") == 1
    num_steps = scheduler.sum("blockyard_steps_total")
    both = before.sum("blockyard_worker_steps_total") + worker.sum("blockyard_worker_steps_total")
    assert before.sum("blockyard_worker_steps_total") > 0
    # The killed worker had computed steps whose answers never came: no more than those in flight.
    assert both <= num_steps + MAX_STEPS_IN_FLIGHT
    assert scheduler.sum("blockyard_step_seconds_count", phase="wait") == num_steps
    assert worker.sum("blockyard_worker_step_seconds_count", phase="forward") == worker.sum(
        "blockyard_worker_steps_total"
    )
