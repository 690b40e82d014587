"""The gateway's settings."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from blockyard.configuration import (
    GatewayProcessSettings,
    InternalSecuritySettings,
    LogSettings,
    ModelSettings,
    PublicSettings,
    ResumeSettings,
    SecuritySettings,
    TextSettings,
    TracingSettings,
)
from blockyard.settings import SettingsError, option

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class ServiceSettings(GatewayProcessSettings):
    scheduler_address: str = option(
        "127.0.0.1:50060",
        "the scheduler: host:port or unix:/path; for several models NAME=ADDRESS of each, with commas between, and"
        " --model in the same form",
    )
    starts_on_demand: bool = option(
        False,
        "be ready without a scheduler or worker, because waiting requests start one; they wait up to"
        " max_scheduler_wait_seconds",
    )
    gateway_health_port: Annotated[int, Field(ge=-1, le=65535)] = option(
        -1, "port of a health service in its own thread, on the same host; 0: any free port, -1: none"
    )
    gateway_lora_root: str = option(
        "",
        "folder below which this machine has the adapters (LoRA) at the same paths as the workers: requests use the"
        " tokenizers and chat templates that adapters bring; empty: all use the model's",
    )
    gateway_local_address: str = option(
        "", "unix:/path at which all APIs are served without keys and TLS, to whoever may open that file; empty: none"
    )


@dataclass(frozen=True, slots=True)
class GatewayConfiguration:
    model: ModelSettings = ModelSettings()
    text: TextSettings = TextSettings()
    public: PublicSettings = PublicSettings()
    security: SecuritySettings = SecuritySettings()
    internal: InternalSecuritySettings = InternalSecuritySettings()
    service: ServiceSettings = ServiceSettings()
    resume: ResumeSettings = ResumeSettings()
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()


OF_MODEL = frozenset(
    {
        *(field.name for section in (ModelSettings, TextSettings) for field in fields(section)),
        *("scheduler_address", "starts_on_demand", "gateway_lora_root"),
    }
)
"""The settings in which the models of a gateway may differ."""


def split_models(configurations: Sequence[GatewayConfiguration]) -> list[GatewayConfiguration]:
    """Returns a configuration for each model; raises SettingsError.

    A gateway has several models if its settings file lists them, or if --scheduler-address names them.
    """
    [first, *others] = configurations
    if others or "=" not in first.service.scheduler_address:
        return [*configurations]
    addresses = _read_names("--scheduler-address", first.service.scheduler_address)
    models = _read_names("--model", first.model.model)
    if addresses.keys() != models.keys():
        message = f"names {', '.join(addresses)}, and --model names {', '.join(models) or 'none'}: name the same models"
        raise SettingsError(f"--scheduler-address {message}")
    return [
        replace(
            first,
            model=replace(first.model, model=models[name]),
            text=replace(first.text, served_model_name=name),
            service=replace(first.service, scheduler_address=address),
        )
        for name, address in addresses.items()
    ]


def _read_names(flag: str, text: str) -> dict[str, str]:
    """Reads NAME=VALUE,NAME=VALUE; raises SettingsError."""
    pairs = [part.partition("=") for part in text.split(",")] if text else []
    values = {name.strip(): value.strip() for name, _, value in pairs}
    if len(values) < len(pairs) or not all(values) or not all(values.values()):
        raise SettingsError(f"{flag} {text!r}: give NAME=VALUE of each model, with commas between")
    return values
