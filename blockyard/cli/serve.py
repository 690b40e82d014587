"""`blockyard serve`: runs all services in the foreground of one terminal."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from blockyard.cli.system_settings import ConfigFile, Model, resolve_system, with_system_settings
from blockyard.cli.top.readings import find_start
from blockyard.client.asynchronous import AsyncClient
from blockyard.extras import require_services
from blockyard.local.local_system import LocalSystem, uses_gpu
from blockyard.local.supervisor import Supervisor
from blockyard.settings import to_yaml
from blockyard.telemetry import EventLogger, configure_logging

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.status import Status

    from blockyard.configuration import SecuritySettings, SystemConfiguration
    from blockyard.local.local_system import Endpoints

log = EventLogger(__name__)


@with_system_settings
def serve(
    model_or_folder: Model = "",
    config: ConfigFile = "",
    print_config: Annotated[bool, typer.Option("--print-config", help="print the settings and exit")] = False,
    **settings: Any,
) -> None:
    """Serve a model: gateway, scheduler and workers together, until Ctrl-C.

    Services that die are restarted. Each option is a setting: it may also stand in the file of --config, or in the
    environment, where --max-num-seqs is BLOCKYARD_MAX_NUM_SEQS.
    """
    configuration = resolve_system(model_or_folder, config, settings)
    if print_config:
        typer.echo(to_yaml(configuration), nl=False)
        return
    require_services("blockyard serve")
    configure_logging("serve", level=configuration.log.log_level, log_format=configuration.log.log_format)
    code = asyncio.run(_serve(configuration))
    if code:
        raise typer.Exit(code)


async def _serve(configuration: SystemConfiguration) -> int:
    system = LocalSystem(configuration)
    if configuration.parallel.world_size > 1 and not uses_gpu(configuration.device):
        log.warning("a processor computes faster with one worker and more threads than with several workers")
    console = Console(stderr=True)
    status = console.status("starting") if console.is_terminal else None
    supervisor = Supervisor(
        system.make_services(),
        lambda: _is_ready(system, status),
        write_line=_writer(console),
        environment=system.make_environment(),
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _stop, supervisor)
    try:
        progress: AbstractContextManager[object] = status or nullcontext()
        with progress:
            await system.prepare(_writer(console))
            started = await supervisor.start()
        if started:
            typer.echo(await _greeting(system))
        return await supervisor.wait()
    finally:
        await supervisor.stop()
        await system.close()


def _stop(supervisor: Supervisor) -> None:
    log.info("stopping when the answers under way have ended; once more to stop at once")
    supervisor.request_stop()


async def _is_ready(system: LocalSystem, status: Status | None) -> bool:
    ready = await system.is_ready()
    if status is not None and not ready and (found := await system.ask_status()):
        status.update(f"starting: {find_start(found) or found.gateway.message}")
    return ready


def _writer(console: Console) -> Callable[[str], None]:
    """Returns a function that writes a service's line: above the spinner on a terminal, plainly elsewhere."""
    if not console.is_terminal:
        return lambda line: print(line, file=sys.stderr, flush=True)  # noqa: T201
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)


async def _greeting(system: LocalSystem) -> str:
    endpoints, security = system.endpoints, system.configuration.security
    async with AsyncClient(endpoints.local) as client:
        (model, *_) = await client.list_models()
    root = f"{'https' if security.tls_certificate else 'http'}://{endpoints.http}"
    ready = ["", f"ready: {model.name}, up to {model.max_model_len} tokens"]
    if system.configuration.public.enable_page:
        ready.append(f"  page   {root}/")
    ready += [f"  gRPC   {endpoints.grpc}", f"  HTTP   {root}/v1", f"  admin  {endpoints.admin}"]
    ready.append(f"  metrics {root}/metrics")
    ready += [f"          http://{address}/metrics ({name})" for name, address in endpoints.metrics.items()]
    if needed := _needed(security):
        return "\n".join([*ready, "", f"  callers need {needed}: see docs/guides/security.md", ""])
    is_demo = not system.configuration.model.model
    examples = _chat_examples if model.has_chat_template else _text_examples
    return "\n".join([*ready, "", *(f"  {line}" for line in examples(model.name, endpoints, root, is_demo)), ""])


def _chat_examples(name: str, endpoints: Endpoints, root: str, is_demo: bool) -> list[str]:
    question = "What does os.path.join do?" if is_demo else "What is a haiku?"
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": question}], "max_tokens": 64})
    call = f'blockyard.Client("{endpoints.grpc}").chat([blockyard.Message("user", "{question}")], max_tokens=64)'
    return [
        f"blockyard chat --target {endpoints.grpc}",
        f"curl {root}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        f"python -c 'import blockyard; print({call}.text)'",
    ]


def _text_examples(name: str, endpoints: Endpoints, root: str, is_demo: bool) -> list[str]:
    prompt = "def read_lines(path):" if is_demo else "Once upon a time"
    body = json.dumps({"model": name, "prompt": prompt, "max_tokens": 64})
    call = f'blockyard.Client("{endpoints.grpc}").generate("{prompt}", max_tokens=64)'
    return [
        f"blockyard generate '{prompt}' --target {endpoints.grpc}",
        f"curl {root}/v1/completions -H 'Content-Type: application/json' -d '{body}'",
        f"python -c 'import blockyard; print({call}.text)'",
    ]


def _needed(security: SecuritySettings) -> str:
    asked = {
        "a key": security.api_keys_file,
        "TLS": security.tls_certificate,
        "a certificate": security.tls_client_authority,
    }
    return " and ".join(name for name, setting in asked.items() if setting)
