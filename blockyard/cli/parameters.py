"""Adds options to commands that do not declare them as parameters: settings and connection options."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockyard.settings import settings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

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


def settings_parameters(configuration: type[Any], chosen: Mapping[str, str]) -> list[inspect.Parameter]:
    """Creates an option for each setting of a configuration class; an option that is not given is None.

    `chosen`: settings that this command does not take, each with the reason for the error message.
    """
    options = [_make_option(setting) for setting in settings_of(configuration)]
    return [*options, *(_make_refused_option(name, why) for name, why in chosen.items())]


def _make_option(setting: Setting) -> inspect.Parameter:
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
        rich_help_panel=setting.section.replace("_", " ").capitalize(),
    )
    return _make_parameter(setting.name, bool | None if is_switch else str | None, shown)


def _make_refused_option(name: str, why: str) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")

    def refuse(value: str | None) -> None:
        if value is not None:
            raise typer.BadParameter(f"this command does not take the setting: {why}")

    return _make_parameter(name, str | None, typer.Option(flag, hidden=True, callback=refuse, expose_value=False))


def _make_parameter(name: str, kind: Any, declaration: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, declaration]
    )
