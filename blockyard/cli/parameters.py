"""Adds options to commands that do not declare them as parameters: settings and connection options."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockyard.settings import settings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from blockyard.settings import Setting


def named_parameters(command: Callable[..., None]) -> list[inspect.Parameter]:
    signature = inspect.signature(command, eval_str=True)
    return [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]


def with_parameters(command: Callable[..., None], added: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """Wraps a command so that it gets the added parameters by keyword."""

    @functools.wraps(command)
    def called(**given: Any) -> None:
        command(**given)

    called.__annotations__ = {}
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*named_parameters(command), *added)]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return called


def settings_parameters(
    configuration: type[Any], chosen: Mapping[str, str], common: Sequence[str]
) -> list[inspect.Parameter]:
    """Creates an option for each setting of a configuration class; an option that is not given is None.

    Args:
        configuration: the class.
        chosen: settings that this command does not take, each with the reason for the error message.
        common: names of the settings that help shows first; it shows the others with --help-all, by their sections.
    """
    settings = {setting.name: setting for setting in settings_of(configuration)}
    options = [_make_option(settings[name], is_common=True) for name in common]
    options += [_make_option(setting, is_common=False) for name, setting in settings.items() if name not in common]
    return [*options, *(_make_refused_option(name, why) for name, why in chosen.items())]


def _make_option(setting: Setting, *, is_common: bool) -> inspect.Parameter:
    flag = setting.flag
    is_switch = setting.type is bool
    default = {True: "on", False: "off"}[setting.default] if is_switch else setting.default
    # The help of a setting without a default explains the empty value itself.
    told_default = f" (default: {default})" if str(default) else ""
    shown = typer.Option(
        f"{flag}/--no-{flag[2:]}" if is_switch else flag,
        help=setting.help + told_default,
        metavar=None if is_switch else "|".join(setting.choices) or "VALUE",
        show_default=False,
        rich_help_panel=None if is_common else setting.section.replace("_", " ").capitalize(),
    )
    return make_parameter(setting.name, bool | None if is_switch else str | None, shown)


def _make_refused_option(name: str, why: str) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")

    def refuse(value: str | None) -> None:
        if value is not None:
            raise typer.BadParameter(f"this command does not take the setting: {why}")

    return make_parameter(name, str | None, typer.Option(flag, hidden=True, callback=refuse, expose_value=False))


def make_parameter(name: str, kind: Any, declaration: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, declaration]
    )
