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
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

ENVIRONMENT_PREFIX = "BLOCKYARD_"
MODELS = "models"
"""The key of a YAML file under which each model has an entry with its own settings."""
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
    file, in_file = _read_file(flags, environment)
    has_models = in_file.pop(MODELS, None) is not None
    problems = _find_unknown(f"--config {file}", in_file, [setting.name for setting in settings])
    if has_models:
        problems.append(
            f"--config {file}: the list {MODELS} is for `blockyard serve`, `up` and `run` and for gateways, and here "
            "one model is meant: name it, and give its settings as flags or without the list"
        )
    given = {setting.name: _given(setting, flags, environment, file, in_file) for setting in settings}
    return _build(configuration, given, problems)


def resolve_each(
    configuration: type[T],
    flags: Mapping[str, Any],
    of_model: Collection[str],
    *,
    environment: Mapping[str, str] | None = None,
) -> list[T]:
    """Builds one configuration for each entry of the YAML file's list `models`; raises SettingsError.

    An entry holds the settings in which its model differs; they go before all other sources. Without the list returns
    one configuration.

    Args:
        configuration: the dataclass of sections.
        flags: values from the command line by name; "config" is the YAML file, "models" a list instead of the file's.
        of_model: the names of the settings that an entry may hold.
        environment: variables to use instead of the process's own.
    """
    environment = os.environ if environment is None else environment
    settings = settings_of(configuration)
    file, in_file = _read_file(flags, environment)
    entries: Any = flags.get(MODELS) or in_file.pop(MODELS, [{}])
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):  # type: ignore[misc]
        raise SettingsError(f"--config {file}: {MODELS} must be a list with a mapping of settings for each model")
    problems = _find_unknown(f"--config {file}", in_file, [setting.name for setting in settings])
    given = {setting.name: _given(setting, flags, environment, file, in_file) for setting in settings}
    built: list[T] = []
    for index, entry in enumerate(typing.cast("list[dict[str, Any]]", entries)):
        source = f"{MODELS}[{index}] in {file}"
        problems += _find_unknown(source, entry, of_model)
        own = {name: (value, f"{name} of {source}") for name, value in entry.items() if name in given}
        built.append(_build(configuration, given | own, problems))
    return built


def _read_file(flags: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Returns the name and the content of the YAML file; both are empty without one."""
    file = flags.get("config") or environment.get(ENVIRONMENT_PREFIX + "CONFIG") or ""
    return file, _given_in_file(file) if file else {}


def _find_unknown(source: str, given: Iterable[str], known: Collection[str]) -> list[str]:
    """Returns the problem that a source has unknown settings, or no problem."""
    unknown = [f"{name}{suggestion(str(name), known)}" for name in sorted(set(given) - set(known))]
    return [f"{source}: unknown settings: {', '.join(unknown)}"] if unknown else []


def _build(configuration: type[T], given: Mapping[str, Any], problems: Sequence[str]) -> T:
    """Builds a configuration from values with their sources; raises SettingsError with all problems."""
    problems = list(problems)
    sections: dict[str, dict[str, Any]] = {setting.section: {} for setting in settings_of(configuration)}
    for setting in settings_of(configuration):
        if given[setting.name] is None:
            continue
        try:
            sections[setting.section][setting.name] = setting.read(*given[setting.name])
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
    return [to_flag(item.name, getattr(section, item.name)) for item in dataclasses.fields(section)]


def to_flag(name: str, value: Any) -> str:
    """Formats the value of a setting as the flag that produces it."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={value}"


def load(configuration: type[T], program: str, description: str, arguments: list[str] | None = None) -> T:
    """Reads a process's configuration; prints and exits on --print-config, and with status 2 on a bad setting."""
    [configured] = _load(lambda flags: [resolve(configuration, flags)], configuration, program, description, arguments)
    return configured


def load_each(
    configuration: type[T],
    program: str,
    description: str,
    arguments: list[str] | None = None,
    *,
    of_model: Collection[str],
) -> list[T]:
    """Reads the configurations of a process that serves several models, as `load` does; see `resolve_each`."""
    return _load(
        lambda flags: resolve_each(configuration, flags, of_model), configuration, program, description, arguments
    )


def _load(
    read: Callable[[Mapping[str, Any]], list[T]],
    configuration: type[T],
    program: str,
    description: str,
    arguments: list[str] | None,
) -> list[T]:
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
        configured = read(flags)
    except SettingsError as error:
        parser.error(str(error))
    if flags.get("print_config"):
        sys.stdout.write("---\n".join(map(to_yaml, configured)))
        raise SystemExit(0)
    return configured
