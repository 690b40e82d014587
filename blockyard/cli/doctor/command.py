"""`blockyard doctor`: checks this machine, the settings and the named services."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from blockyard.cli.doctor.config import DoctorConfiguration
from blockyard.cli.doctor.findings import Finding, Level
from blockyard.cli.doctor.kernels import look_at_kernels
from blockyard.cli.doctor.machine import look_at_machine
from blockyard.cli.doctor.model import look_at_code, look_at_model, look_at_template
from blockyard.cli.doctor.services import look_at_services, look_at_settings
from blockyard.cli.parameters import settings_parameters, with_parameters
from blockyard.settings import SettingsError, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

# The settings that help shows without --help-all.
_COMMON = ("model", "revision", "device", "dtype", "quantization", "scheduler_address", "worker_address")
_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    config: Annotated[str, typer.Option(metavar="FILE", help="YAML file with settings", show_default=False)] = "",
    **settings: Any,
) -> None:
    """Check whether this machine is ready to serve with these settings, and advise what to change.

    Exits with 1 if a check fails; warnings alone do not count.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        configuration = resolve(DoctorConfiguration, {**given, "config": config})
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from None
    findings = asyncio.run(_look(configuration))
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(1)


def make_command() -> Callable[..., None]:
    """Returns the command, with every setting as an option."""
    return with_parameters(doctor, settings_parameters(DoctorConfiguration, {}, _COMMON))


async def _look(configuration: DoctorConfiguration) -> list[Finding]:
    kernels = asyncio.ensure_future(look_at_kernels(configuration.worker))
    findings = list(look_at_machine(configuration))
    around = [*look_at_code(configuration), *look_at_model(configuration), *look_at_template(configuration)]
    around += look_at_settings(configuration, configuration.internal)
    addresses = configuration.addresses
    around += await look_at_services(
        _split(addresses.scheduler_address), _split(addresses.worker_address), configuration.internal
    )
    return [*findings, *await kernels, *around]


def _split(addresses: str) -> list[str]:
    return [each.strip() for each in addresses.replace("+", ",").split(",") if each.strip()]


def _show(findings: list[Finding]) -> None:
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        table.add_row(f"[{_STYLES[finding.level]}]{finding.level}[/]", finding.subject, _escape(finding))
    Console().print(table)


def _escape(finding: Finding) -> str:
    text = f"{finding.text}\n→ {finding.advice}" if finding.advice else finding.text
    return text.replace("[", "\\[")
