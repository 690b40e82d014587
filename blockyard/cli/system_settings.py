"""The model and the settings of a system on a command line: of `serve`, `run`, `up`, `plan` and `launch`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockyard.cli.parameters import named_parameters, settings_parameters, with_parameters
from blockyard.configuration import CHOSEN_TOGETHER, SystemConfiguration
from blockyard.settings import MODELS, SettingsError, resolve, resolve_each, settings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

DEMO = "demo"
# The settings that help shows without --help-all, in this order.
COMMON = (
    "revision",
    "served_model_name",
    "max_model_len",
    "device",
    "dtype",
    "quantization",
    "tensor_parallel_size",
    "data_parallel_size",
    "max_num_seqs",
    "host",
    "http_port",
    "grpc_port",
    "api_keys_file",
    "log_level",
    "log_format",
)

# The settings in which the models of one system may differ.
OF_MODEL = frozenset(
    setting.name
    for setting in settings_of(SystemConfiguration)
    if setting.section
    in (
        *("model", "text", "load", "device", "cache", "lora", "scheduler", "scheduler_process", "worker"),
        *("parallel", "replicas"),
    )
)

Models = Annotated[
    list[str] | None,
    typer.Argument(metavar="MODEL", help=f"folders or hub ids; default: {DEMO}, the demo model"),
]
Model = Annotated[str, typer.Argument(metavar="MODEL", help=f"folder or hub id; default: {DEMO}, the demo model")]
SystemName = Annotated[str, typer.Option(help="the system's name for ps, stop and logs; default: the model's")]
ConfigFile = Annotated[str, typer.Option(metavar="FILE", help="YAML file with settings", show_default=False)]


def with_system_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Adds every setting of a system to a command, as options by keyword; the command's own options stay its own."""
    own = {each.name for each in named_parameters(command)}
    settings = settings_parameters(SystemConfiguration, CHOSEN_TOGETHER, COMMON)
    return with_parameters(command, [each for each in settings if each.name not in own])


def resolve_system(model: str, config: str, settings: Mapping[str, Any]) -> SystemConfiguration:
    """Builds the configuration from a command line's model, file and settings; raises typer.BadParameter."""
    flags = _read_flags([model] if model else [], config, settings)
    try:
        return resolve(SystemConfiguration, flags)
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from None


def resolve_systems(models: Sequence[str], config: str, settings: Mapping[str, Any]) -> list[SystemConfiguration]:
    """Builds a configuration for each model of a system, as `resolve_system` does.

    A system has several models if its command line names them, or the list `models` of its file.
    """
    flags = _read_flags(models, config, settings)
    try:
        return resolve_each(SystemConfiguration, flags, OF_MODEL)
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from None


def _read_flags(models: Sequence[str], config: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    given = given_settings(settings)
    if models and given.setdefault("model", models[0]) != models[0]:
        raise typer.BadParameter(
            f"the model is given twice, as MODEL and as --model {given['model']}", param_hint="MODEL"
        )
    if given.get("model") == DEMO:
        given["model"] = _find_demo(DEMO)
    several = {MODELS: [{"model": _find_demo(model)} for model in models]} if len(models) > 1 else {}
    return {**given, **several, "config": config}


def _find_demo(model: str) -> str:
    return "" if model == DEMO and not Path(DEMO).is_dir() else model


def given_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings without those that are None, which the command line does not name."""
    return {name: value for name, value in settings.items() if value is not None}
