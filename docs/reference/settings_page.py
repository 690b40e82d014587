"""Writes the page of settings from the services' configurations. Run `generate.py`, which imports this."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.configuration import CHOSEN_TOGETHER, SystemConfiguration
from blockyard.settings import settings_of
from gateway.config import GatewayConfiguration
from scheduler_service.config import SchedulerConfiguration
from worker_service.config import WorkerConfiguration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blockyard.settings import Setting


def _default(setting: Setting) -> str:
    return f"`{setting.default}`" if str(setting.default) else "empty"


CONFIGURATION = """\
# Settings
{note}

A setting is given as a flag, as an environment variable, or in a YAML file named by `--config FILE` (or
`BLOCKYARD_CONFIG`), where its key is the flag without the dashes in front and with underscores inside. A flag goes
before the environment, which goes before the file. `--print-config` prints what is in effect, in the form of such a
file. A wrong value is an error, as are an unknown flag and an unknown key; all that is wrong is told at once.
"""
SERVICE = """
## {title}

`python -m {module}`

| flag, variable | default | what it is |
|---|---|---|
{rows}
"""
SERVICES = (
    ("Gateway", "gateway", GatewayConfiguration),
    ("Scheduler", "scheduler_service", SchedulerConfiguration),
    ("Worker", "worker_service", WorkerConfiguration),
)
TOGETHER = """
## All together

`blockyard serve` and `blockyard.LLM` take the settings of all three, and these, or with these defaults (`LLM` has no
ports of metrics unless it is given some):

| flag, variable | default | what it is |
|---|---|---|
{rows}

They choose these by themselves:

| flag | why |
|---|---|
{chosen}
"""


def _setting_row(setting: Setting) -> str:
    choices = f" One of {', '.join(f'`{choice}`' for choice in setting.choices)}." if setting.choices else ""
    told = setting.help.replace("|", "\\|")
    told = f"{told[:1].upper()}{told[1:]}."
    return f"| `{setting.flag}`<br>`{setting.variable}` | {_default(setting)} | {told}{choices} |"


def _rows(settings: Iterable[Setting]) -> str:
    return "\n".join(map(_setting_row, settings))


def _chosen() -> str:
    flags: dict[str, list[str]] = {}
    for name, why in CHOSEN_TOGETHER.items():
        flags.setdefault(why, []).append(f"`--{name.replace('_', '-')}`")
    return "\n".join(f"| {', '.join(names)} | {why[:1].upper()}{why[1:]}. |" for why, names in flags.items())


def settings_page(note: str) -> str:
    """The settings of each service, and what there is beside them where they run together."""
    services = [
        SERVICE.format(title=title, module=module, rows=_rows(settings_of(configuration)))
        for title, module, configuration in SERVICES
    ]
    of_services = [setting for *_, configuration in SERVICES for setting in settings_of(configuration)]
    told = {(setting.name, setting.default) for setting in of_services}
    beside = [setting for setting in settings_of(SystemConfiguration) if (setting.name, setting.default) not in told]
    return CONFIGURATION.format(note=note) + "".join(services) + TOGETHER.format(rows=_rows(beside), chosen=_chosen())
