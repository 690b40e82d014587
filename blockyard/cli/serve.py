"""`blockyard serve`: runs all services in the foreground of one terminal."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockyard.cli.progress import StartBars, download
from blockyard.cli.system_settings import ConfigFile, Models, SystemName, resolve_systems, with_system_settings
from blockyard.client.asynchronous import AsyncClient
from blockyard.configuration import LogSettings
from blockyard.extras import require_services
from blockyard.local.gpus import uses_gpu
from blockyard.local.local_system import LocalSystem
from blockyard.local.model_manager import managed_models
from blockyard.local.registry import registered
from blockyard.local.supervisor import Supervisor
from blockyard.settings import to_yaml
from blockyard.telemetry import EventLogger, configure_logging

if TYPE_CHECKING:
    from blockyard.configuration import SecuritySettings
    from blockyard.local.local_system import Endpoints

log = EventLogger(__name__)


@with_system_settings
def serve(
    models: Models = None,
    config: ConfigFile = "",
    name: SystemName = "",
    print_config: Annotated[bool, typer.Option("--print-config", help="print the settings and exit")] = False,
    background_log: Annotated[str, typer.Option(hidden=True, help="the file that `blockyard up` logs to")] = "",
    **settings: Any,
) -> None:
    """Serve models: gateway, schedulers and workers together, until Ctrl-C.

    Several models are loaded at their first requests. Services that die are restarted. Each option is a setting, also
    in the file of --config, or in the environment: --max-num-seqs is BLOCKYARD_MAX_NUM_SEQS. A terminal shows bars and
    warnings alone; --log-format brings the whole log.
    """
    configuration, *others = resolve_systems(models or [], config, settings)
    if print_config:
        typer.echo("---\n".join(map(to_yaml, [configuration, *others])), nl=False)
        return
    require_services("blockyard serve")
    configure_logging("serve", level=configuration.log.log_level, log_format=configuration.log.log_format)
    bars = StartBars()
    if bars.is_shown and configuration.log == LogSettings():
        quiet = LogSettings(log_level="warning")
        configuration, *others = [dataclasses.replace(each, log=quiet) for each in (configuration, *others)]
    system = LocalSystem(configuration, *others)
    command = "up" if background_log else "serve"
    try:
        with registered(system, command, name=name, log=background_log), bars:
            download([configuration, *others], bars)
            code = asyncio.run(_serve(system, bars))
    finally:
        # Removes the sockets' folder also if nothing was started.
        asyncio.run(system.close())
    if code:
        raise typer.Exit(code)


async def _serve(system: LocalSystem, bars: StartBars) -> int:
    configuration = system.configuration
    if configuration.parallel.world_size > 1 and not uses_gpu(configuration.device):
        log.warning("a processor computes faster with one worker and more threads than with several workers")

    async def is_ready() -> bool:
        ready = await system.is_ready()
        if not ready:
            bars.show_status(await system.ask_status())
        return ready

    supervisor = Supervisor(
        system.make_services(), is_ready, write_line=bars.write_line, environment=system.make_environment()
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _stop, supervisor)
    try:
        await system.prepare(bars.write_line)
        started = await supervisor.start()
        bars.close()
        if started:
            typer.echo(await _greeting(system))
        async with managed_models(system, supervisor):
            return await supervisor.wait()
    finally:
        await supervisor.stop()
        await system.close()


def _stop(supervisor: Supervisor) -> None:
    log.info("stopping when the answers under way have ended; once more to stop at once")
    supervisor.request_stop()


async def _greeting(system: LocalSystem) -> str:
    endpoints, security = system.endpoints, system.configuration.security
    async with AsyncClient(endpoints.local) as client:
        (model, *_) = await client.list_models()
    root = f"{'https' if security.tls_certificate else 'http'}://{endpoints.http}"
    ready = ["", f"ready: {_describe_models(system) or f'{model.name}, up to {model.max_model_len} tokens'}"]
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


def _describe_models(system: LocalSystem) -> str:
    """Returns the models that are loaded at their first requests; empty: the model is loaded."""
    if not system.is_switched:
        return ""
    names = ", ".join(model.name for model in system.models)
    at_a_time = f", {system.num_places} at a time" if len(system.models) > 1 else ""
    return f"{names}, loaded at the first request{at_a_time}"


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
