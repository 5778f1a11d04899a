"""Turns a function into a command: its first parameter is a session, the others are what is typed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperArgument, TyperCommand, TyperGroup

from falaj.apps.cli.names import with_similar
from falaj.apps.cli.options import GlobalOptions
from falaj.apps.cli.output.errors import discard_output
from falaj.apps.cli.session import Session
from falaj.errors import NotFound

CommandFunction = Callable[..., int | None]
"""Takes a Session and what was typed; returns the exit status, none for 0."""


def command(name: str, function: CommandFunction, *, prints: bool = True, creates_home: bool = False) -> Any:
    """Return `function` as the command `name`. `prints`: it has a result, so --json applies to it."""
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command(name, cls=FalajCommand)(_typed(function, prints=prints, creates_home=creates_home))
    return typer.main.get_command(app)


def group(
    name: str,
    summary: str,
    functions: Mapping[str, CommandFunction],
    *,
    default_command: str | None = None,
    creating: Collection[str] = (),
) -> Any:
    """Return a group of commands; `default_command` is run where none of them is named.

    Those that are `creating` create the home that they act on, if there is none.
    """
    kind = type("Group", (FalajGroup,), {"default_command": default_command})
    app = typer.Typer(name=name, cls=kind, help=summary, rich_markup_mode=None, add_completion=False)
    app.callback(invoke_without_command=True)(_help_alone)
    for verb, function in functions.items():
        first = inspect.getdoc(function) or ""
        app.command(verb, cls=FalajCommand, short_help=first.partition("\n")[0])(
            _typed(function, prints=True, creates_home=verb in creating)
        )
    return typer.main.get_command(app)


class FalajGroup(TyperGroup):
    """A group of commands, with an optional default."""

    default_command: str | None = None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if (
            self.default_command
            and not {"--help", "-h"}.intersection(args[:1])
            and (not args or args[0][:1] == "-")
        ):
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)


class FalajCommand(TyperCommand):
    """A command whose usage line shows its arguments and required options."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        parameters: list[Any] = self.get_params(ctx)
        typed = [
            _bracketed(
                each, each.metavar if isinstance(each, TyperArgument) else f"{each.opts[0]} {each.metavar}"
            )
            for each in parameters
            if isinstance(each, TyperArgument) or each.required
        ]
        return [*typed, "[OPTIONS]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        parameters: list[Any] = self.get_params(ctx)
        arguments = [(p.metavar, p.help or "") for p in parameters if isinstance(p, TyperArgument)]
        options = [p.get_help_record(ctx) for p in parameters if not isinstance(p, TyperArgument)]
        for title, rows in (("Arguments", arguments), ("Options", [row for row in options if row])):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _bracketed(parameter: Any, text: str | None) -> str:
    return f"{text}" if parameter.required else f"[{text}]"


def _help_alone(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


HOME = Annotated[str | None, typer.Option("--home", hidden=True)]
URL = Annotated[str | None, typer.Option("--url", hidden=True)]
JSON = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
QUIET_JSON = Annotated[bool, typer.Option("--json", hidden=True)]


def _typed(function: CommandFunction, *, prints: bool, creates_home: bool) -> Callable[..., int | None]:
    """Return `function` for typer: the global options are removed, and a session is passed."""

    def run(ctx: typer.Context, **typed: Any) -> int | None:
        after = GlobalOptions(typed.pop("home_option"), typed.pop("url_option"), typed.pop("json_option"))
        session = Session.of(ctx.obj, after, creates_home=creates_home)
        try:
            return function(session, **typed)
        except BrokenPipeError:
            return discard_output()
        except NotFound as error:
            raise with_similar(session, error) from None

    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    added = [
        _option("json_option", JSON if prints else QUIET_JSON, False),
        _option("home_option", HOME, None),
        _option("url_option", URL, None),
    ]
    parameters = [context, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own), *added]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {}
    run.__doc__ = function.__doc__
    return run


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
