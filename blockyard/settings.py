"""Reads settings into dataclasses; precedence: defaults < YAML file < environment < flags.

A process's configuration is a frozen dataclass whose fields are sections, each a frozen dataclass of plain fields made
with `option()`. Names are unique over all sections, so that a flag is `--name-of-field`, its environment variable
`BLOCKYARD_NAME_OF_FIELD`, and its key in the YAML file `name_of_field`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import os
import sys
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pydantic
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ENVIRONMENT_PREFIX = "BLOCKYARD_"
T = TypeVar("T")


def option(default: Any, help: str, *, choices: tuple[str, ...] = ()) -> Any:
    """Declares a setting. `help`: a phrase with the unit. `choices`: the allowed values; empty: any."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


class SettingsError(Exception):
    """Settings have bad values or unknown names. The message lists all of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a configuration class."""

    section: str
    name: str
    type: Any
    default: Any
    help: str
    choices: tuple[str, ...]

    @property
    def flag(self) -> str:
        """The setting's flag on the command line: `--name-of-field`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The setting's environment variable: `BLOCKYARD_NAME_OF_FIELD`."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    def read(self, value: Any, source: str) -> Any:
        """Checks a value and converts it to the setting's type; raises SettingsError, which names `source`."""
        if self.choices and str(value) not in self.choices:
            raise SettingsError(f"{source}: {value!r} is none of {', '.join(self.choices)}")
        try:
            return pydantic.TypeAdapter(self.type).validate_python(value)
        except pydantic.ValidationError as error:
            reasons = "; ".join(item["msg"] for item in error.errors())
            raise SettingsError(f"{source}: {value!r}: {reasons}") from None


@functools.cache
def settings_of(configuration: type[Any]) -> tuple[Setting, ...]:
    """Lists the settings of a configuration class, in order."""
    found: list[Setting] = []
    sections = typing.get_type_hints(configuration)
    for section in dataclasses.fields(configuration):
        hints = typing.get_type_hints(sections[section.name], include_extras=True)
        for item in dataclasses.fields(sections[section.name]):
            found.append(
                Setting(
                    section.name,
                    item.name,
                    hints[item.name],
                    item.default,
                    item.metadata.get("help", ""),
                    item.metadata.get("choices", ()),
                )
            )
    names = [setting.name for setting in found]
    assert len(set(names)) == len(names), f"{configuration.__name__}: a name stands in two sections"
    return tuple(found)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns a hint with the known name that is most like this one; empty if none is."""
    meant = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f" (did you mean {meant[0]}?)" if meant else ""


def make_parser(configuration: type[Any], program: str, description: str) -> argparse.ArgumentParser:
    """Creates the argument parser of a configuration class. Flags that are not given are absent from its result."""
    parser = argparse.ArgumentParser(
        program, description=description, argument_default=argparse.SUPPRESS, allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings; flags and environment go before it")
    parser.add_argument("--print-config", action="store_true", help="print the settings in effect and exit")
    groups: dict[str, Any] = {}
    for setting in settings_of(configuration):
        group = groups.setdefault(setting.section, parser.add_argument_group(setting.section))
        text = f"{setting.help} [{setting.default}] (env {setting.variable})".replace("%", "%%")
        if setting.type is bool:
            group.add_argument(setting.flag, dest=setting.name, action=argparse.BooleanOptionalAction, help=text)
        else:
            metavar = "{" + ",".join(setting.choices) + "}" if setting.choices else "VALUE"
            group.add_argument(setting.flag, dest=setting.name, metavar=metavar, help=text)
    return parser


def _why_unreadable(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or "it cannot be read"
    mark: Any = getattr(error, "problem_mark", None)
    if mark is None:
        return "it is not text in UTF-8"
    return f"line {mark.line + 1} is no YAML: {getattr(error, 'problem', '') or 'it cannot be understood'}"


def _given_in_file(path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"--config {path}: {_why_unreadable(error)}") from None
    if not isinstance(content, dict):
        raise SettingsError(f"--config {path}: not a mapping of settings")
    return {str(name): value for name, value in typing.cast("dict[Any, Any]", content).items()}


def _given(setting: Setting, flags: Mapping[str, Any], environment: Mapping[str, str], file: str, in_file: Any) -> Any:
    """Returns a setting's value from the first source that has it, and the source's name; None if none has it."""
    if setting.name in flags:
        return flags[setting.name], setting.flag
    if setting.variable in environment:
        return environment[setting.variable], setting.variable
    if setting.name in in_file:
        return in_file[setting.name], f"{setting.name} in {file}"
    return None


def resolve(configuration: type[T], flags: Mapping[str, Any], *, environment: Mapping[str, str] | None = None) -> T:
    """Builds a configuration from all sources; raises SettingsError with all problems.

    Args:
        configuration: the dataclass of sections.
        flags: values from the command line by name; "config" is the YAML file.
        environment: variables to use instead of the process's own.
    """
    environment = os.environ if environment is None else environment
    settings = settings_of(configuration)
    sections: dict[str, dict[str, Any]] = {setting.section: {} for setting in settings}
    file = flags.get("config") or environment.get(ENVIRONMENT_PREFIX + "CONFIG") or ""
    in_file = _given_in_file(file) if file else {}
    known = [setting.name for setting in settings]
    unknown = [f"{name}{suggestion(name, known)}" for name in sorted(set(in_file) - set(known))]
    problems = [f"--config {file}: unknown settings: {', '.join(unknown)}"] if unknown else []
    for setting in settings:
        given = _given(setting, flags, environment, file, in_file)
        if given is None:
            continue
        try:
            sections[setting.section][setting.name] = setting.read(*given)
        except SettingsError as error:
            problems.append(str(error))
    if problems:
        raise SettingsError("\n".join(problems))
    hints = typing.get_type_hints(configuration)
    return configuration(**{section: hints[section](**values) for section, values in sections.items()})


def to_yaml(configuration: Any) -> str:
    """Formats a configuration as a YAML file that produces it."""
    flat: dict[str, Any] = {}
    for section in dataclasses.asdict(configuration).values():
        flat.update(section)
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in flat.items()}
    return yaml.safe_dump(plain, sort_keys=False)


def to_flags(section: Any) -> list[str]:
    flags: list[str] = []
    for item in dataclasses.fields(section):
        flag, value = item.name.replace("_", "-"), getattr(section, item.name)
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags.append(f"--{flag}={value}")
    return flags


def load(configuration: type[T], program: str, description: str, arguments: list[str] | None = None) -> T:
    """Reads a process's configuration; prints and exits on --print-config, and with status 2 on a bad setting."""
    parser = make_parser(configuration, program, description)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        flags_known = [setting.flag for setting in settings_of(configuration)]
        parser.error(
            "unknown arguments: "
            + ", ".join(each + suggestion(each.partition("=")[0], flags_known) for each in unknown)
        )
    flags = vars(parsed)
    try:
        configured = resolve(configuration, flags)
    except SettingsError as error:
        parser.error(str(error))
    if flags.get("print_config"):
        sys.stdout.write(to_yaml(configured))
        raise SystemExit(0)
    return configured
