"""`blockyard bench`: puts load on a server and reports the latencies and rates that its clients measure."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import blockyard
from blockyard.cli.connection import connection
from blockyard.client.targets import DEFAULT_TARGET, call_metadata
from blockyard.load.edits import draw_edits
from blockyard.load.http_stream import get_json
from blockyard.load.load import Api, GrpcApi, HttpApi, Plan, Sample, Shape, Summary, draw_requests, run_load, summarize

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockyard.client.asynchronous import AsyncClient

MEASURES = ("time_to_first_token", "inter_token_latency", "time_per_output_token", "end_to_end")


class Workload(StrEnum):
    RANDOM = "random"
    EDITS = "edits"


class ApiName(StrEnum):
    GRPC = "grpc"
    HTTP = "http"


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    api: str
    target: str
    url: str
    tenant: str
    model: str
    shape: Shape
    plan: Plan
    num_warmup_requests: int
    workload: str


def bench(
    api: Annotated[ApiName, typer.Option(help="which front to load")] = ApiName.GRPC,
    target: Annotated[
        str, typer.Option(help="the gRPC address, or several with commas between", envvar="BLOCKYARD_TARGET")
    ] = DEFAULT_TARGET,
    url: Annotated[str, typer.Option(help="the HTTP address", envvar="BLOCKYARD_URL")] = "http://127.0.0.1:8000",
    tenant: Annotated[str, typer.Option(help="on whose behalf requests are sent")] = "",
    model: Annotated[str, typer.Option(help="the model's name; default: the first")] = "",
    concurrency: Annotated[int, typer.Option(min=1, help="clients of a closed loop")] = 8,
    rate: Annotated[float, typer.Option(min=0, help="requests a second of an open loop; 0: a closed loop")] = 0.0,
    num_requests: Annotated[int, typer.Option(min=0, help="requests to send; 0: as many as --duration allows")] = 0,
    duration: Annotated[float, typer.Option(min=0, help="seconds to send for; 0: until --num-requests")] = 0.0,
    workload: Annotated[
        Workload,
        typer.Option(
            help="random: prompts of random tokens; edits: code from our repository's commits, to be repeated with a "
            "change, which shows what drafts gain"
        ),
    ] = Workload.RANDOM,
    prompt_tokens: Annotated[str, typer.Option(help="tokens of a random prompt: N, or FROM:TO")] = "128",
    output_tokens: Annotated[str, typer.Option(help="tokens of an answer: N, or FROM:TO")] = "64",
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="always generate all tokens")] = True,
    warmup: Annotated[int, typer.Option(min=0, help="requests before, not measured")] = 2,
    seed: Annotated[int, typer.Option(help="of lengths, prompts and arrivals")] = 0,
    output: Annotated[Path | None, typer.Option(dir_okay=False, help="write all numbers here, as JSON")] = None,
) -> None:
    """Measure a running server."""
    if output is not None and not output.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {output.parent}", param_hint="--output")
    if not num_requests and not duration:
        num_requests = 8 * concurrency
    settings = Settings(
        api=api,
        target=target,
        url=url.rstrip("/"),
        tenant=tenant,
        model=model,
        shape=Shape(_range(prompt_tokens), _range(output_tokens), temperature, ignore_eos),
        plan=Plan(concurrency, rate, num_requests, duration, seed),
        num_warmup_requests=warmup,
        workload=workload,
    )
    summary = asyncio.run(_run(settings))
    Console().print(make_table(summary))
    typer.echo(
        f"{summary.requests_per_second:.2f} requests/s, {summary.output_tokens_per_second:.1f} output tokens/s, "
        f"{summary.total_tokens_per_second:.1f} tokens/s with the prompts"
    )
    for reason, count in sorted(summary.errors.items()):
        typer.echo(f"{count} failed: {reason}", err=True)
    if output is not None:
        output.write_text(json.dumps(report(settings, summary), indent=2) + "\n", encoding="utf-8")
    if not summary.num_requests:
        raise typer.Exit(1)


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    try:
        low, high = int(first), int(last or first)
    except ValueError:
        low = high = 0
    if not 1 <= low <= high:
        raise typer.BadParameter(f"{text!r} is neither a number above 0 nor FROM:TO")
    return low, high


async def _run(settings: Settings) -> Summary:
    async with connection().make_async_client(settings.target, settings.tenant) as client:
        api = await _make_api(settings, client)
        draw = draw_edits if settings.workload == Workload.EDITS else draw_requests
        requests = draw(settings.shape, settings.plan.seed)
        if settings.num_warmup_requests:
            await run_load(api, requests, Plan(num_requests=settings.num_warmup_requests))
        with _progress(settings.plan) as on_done:
            return summarize(await run_load(api, requests, settings.plan, on_done))


async def _make_api(settings: Settings, client: AsyncClient) -> Api:
    if settings.api == ApiName.HTTP:
        headers = dict(call_metadata(settings.tenant, connection().api_key))
        name = settings.model or (await get_json(f"{settings.url}/v1/models", headers))["data"][0]["id"]
        return HttpApi(settings.url, name, headers)
    models = await client.list_models()
    model = next((model for model in models if model.name == settings.model), models[0])
    return GrpcApi(client, settings.model, model.vocab_size)


class _progress:
    """A progress bar on a terminal, nothing elsewhere. `with` returns the function to call after each request."""

    def __init__(self, plan: Plan) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("requests"), TimeElapsedColumn())
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("bench", total=plan.num_requests or None)

    def __enter__(self) -> Callable[[Sample], None]:
        self._bar.start()
        return lambda sample: self._bar.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def make_table(summary: Summary) -> Table:
    title = f"{summary.num_requests} requests in {summary.elapsed_seconds:.2f} s, {summary.num_errors} failed"
    if summary.num_rejections:
        title += f", {summary.num_rejections} times refused with a time to come back"
    table = Table(title=title)
    for heading in ("milliseconds", "mean", "p50", "p90", "p99"):
        table.add_column(heading, justify="left" if heading == "milliseconds" else "right")
    for measure in MEASURES:
        seen = getattr(summary, measure)
        numbers = [seen.mean, *seen.percentiles.values()] if seen else []
        table.add_row(measure.replace("_", " "), *(f"{1000 * number:.2f}" for number in numbers))
    return table


def report(settings: Settings, summary: Summary) -> dict[str, Any]:
    """Returns the JSON report: results (times in seconds), settings, machine and command."""
    return {
        "command": shlex.join(["blockyard", *sys.argv[1:]]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": blockyard.__version__,
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "num_cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "settings": dataclasses.asdict(settings),
        "results": dataclasses.asdict(summary),
    }


def _processor() -> str:
    """Returns the processor's name, which platform.processor() does not know on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
