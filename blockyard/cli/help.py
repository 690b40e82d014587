"""The commands' help: every name whole at any width, common options first, the rest with --help-all."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from blockyard.cli.parameters import make_parameter, named_parameters, with_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# The widest name that has its help beside it; the help of a wider one stands below it.
_MAX_NAME_WIDTH = 24
_SHOWS_ALL = "blockyard.help_all"


class App(typer.Typer):
    """A group of commands. An option with a help panel is shown by --help-all, in a section of the panel's name."""

    def __init__(self, *, help: str) -> None:
        super().__init__(
            help=help,
            cls=_Group,
            no_args_is_help=True,
            pretty_exceptions_enable=False,
            # Typer's other modes draw boxes, and cut names that do not fit in a box.
            rich_markup_mode=None,
            context_settings={"help_option_names": ["-h", "--help"]},
        )

    def add(self, command: Callable[..., Any], *, section: str | None = None, name: str | None = None) -> None:
        """Adds a command, under its function's name if `name` is None."""
        self.command(name, rich_help_panel=section)(command)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        settings.setdefault("cls", _Command)
        declare = super().command(name, **settings)
        return lambda command: declare(_with_help_all(command))

    def set_options(self, callback: Callable[..., None]) -> None:
        """Adds a function's parameters as options that stand before a command's name."""
        self.callback()(_with_help_all(callback))


class _Command(TyperCommand):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self, ctx, formatter)


class _Group(TyperGroup):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if not command.hidden:
                sections.setdefault(command.rich_help_panel or "Commands", []).append((name, _summarize(command)))
        for section, rows in sections.items():
            with formatter.section(section):
                formatter.write_dl(rows, col_max=_MAX_NAME_WIDTH)
        _write_parameters(self, ctx, formatter)


def _summarize(command: Any) -> str:
    """Returns the first sentence of a command's help."""
    paragraph = " ".join((command.help or "").partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].partition("; ")[0].rstrip(".")


def _panel(parameter: Any) -> str | None:
    return getattr(parameter, "rich_help_panel", None)


def _show_all(ctx: typer.Context, is_given: bool) -> None:
    if is_given:
        ctx.meta[_SHOWS_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def _with_help_all(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --help-all to a command that has options with a panel."""
    declarations = [each for given in named_parameters(command) for each in get_args(given.annotation)[1:]]
    if not any(map(_panel, declarations)):
        return command
    option = typer.Option(
        "--help-all", is_eager=True, expose_value=False, callback=_show_all, help="Show all options and exit."
    )
    added = make_parameter("help_all", bool, option)

    @functools.wraps(command)
    def called(help_all: bool = False, **given: Any) -> None:
        command(**given)

    return with_parameters(called, [added.replace(default=False)])


def _write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    parameters = [each for each in command.get_params(ctx) if not getattr(each, "hidden", False)]
    rare = [each for each in parameters if _panel(each)]
    common = [each for each in parameters if not _panel(each)]
    arguments = [each for each in common if each.param_type_name == "argument"]
    _write_section("Arguments", arguments, ctx, formatter)
    _write_section("Options", [each for each in common if each not in arguments], ctx, formatter)
    if not ctx.meta.get(_SHOWS_ALL):
        if rare:
            formatter.write_paragraph()
            formatter.write_text(f"{len(rare)} more options: {ctx.command_path} --help-all")
        return
    for panel in dict.fromkeys(map(_panel, rare)):
        _write_section(panel or "", [each for each in rare if _panel(each) == panel], ctx, formatter)


def _write_section(title: str, parameters: Iterable[Any], ctx: Any, formatter: Any) -> None:
    rows = [record for each in parameters if (record := each.get_help_record(ctx)) is not None]
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows, col_max=_MAX_NAME_WIDTH)
