"""The model and the settings of a system on a command line: of `serve`, `run`, `up`, `plan` and `launch`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockyard.cli.parameters import named_parameters, settings_parameters, with_parameters
from blockyard.configuration import CHOSEN_TOGETHER, SystemConfiguration
from blockyard.settings import SettingsError, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
    given = given_settings(settings)
    if model and given.setdefault("model", model) != model:
        raise typer.BadParameter(
            f"the model is given twice, as MODEL and as --model {given['model']}", param_hint="MODEL"
        )
    if given.get("model") == DEMO and not Path(DEMO).is_dir():
        given["model"] = ""
    try:
        return resolve(SystemConfiguration, {**given, "config": config})
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from None


def given_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings without those that are None, which the command line does not name."""
    return {name: value for name, value in settings.items() if value is not None}
