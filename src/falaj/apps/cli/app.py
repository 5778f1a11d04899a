"""The root of the command line: its global options, and every command, imported only when it is used."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from falaj.apps.cli.options import GlobalOptions

PROGRAM = "falaj"
COMPLETE_VARIABLE = "_FALAJ_COMPLETE"

COMMANDS = {
    "up": ("Start the platform on this machine, in the foreground.", "lifecycle"),
    "status": ("Say whether a platform runs on the home, and where.", "lifecycle"),
    "down": ("Stop the platform that runs on the home.", "lifecycle"),
    "doctor": ("Check the installation and the home, and say what mends them.", "doctor"),
    "apply": ("Bring entities and feature views to the definitions in files.", "apply"),
    "train": ("Run a training script as a job, and follow it.", "train"),
    "deploy": ("Answer requests with a model version.", "endpoints"),
    "login": ("Sign in to a platform, and keep the credential.", "login"),
    "config": ("Check falaj.toml, or show it with its defaults.", "config"),
    "completion": ("Print the completion script of a shell.", "completion"),
}
"""What a command does, and the module here that has it under `COMMANDS`."""

GROUPS = {
    "workspaces": "Workspaces, and who holds which role in them.",
    "users": "People and service accounts.",
    "groups": "Groups of users, who hold the roles of their groups.",
    "tokens": "Tokens and sign-in links.",
    "policies": "Policies: publish and test them, ask who can do what.",
    "objects": "Anything that is stored: where it lies, whose it is, its label.",
    "zones": "Zones, and what may lie in them.",
    "keys": "Data keys: list, rotate, destroy.",
    "secrets": "Secrets that jobs are given: set, list, remove; never shown.",
    "blobs": "Bytes: put, get, list, copy, delete.",
    "lineage": "What came from what.",
    "audit": "The audit log: list, export, prove, verify.",
    "workflows": "Long work: watch it, cancel it.",
    "platform": "The platform that answers: its version, controller and metrics.",
    "runs": "Runs of experiments: parameters, metrics, artifacts.",
    "nodes": "Machines that run jobs: what they are made of, and what is free.",
    "jobs": "Jobs: list them, read their logs, wait, cancel, retry, move, explain.",
    "queues": "Queues: quotas, borrowing and fair share of the machines, and budgets.",
    "usage": "What jobs have used: GPU-hours, CPU-hours, energy and cost.",
    "features": "Features: define views, take rows in, make training sets, read online.",
    "models": "Models: register versions, promote, approve, roll back, verify.",
    "endpoints": "Endpoints: deploy model versions, route requests, read predictions and scores.",
    "monitoring": "Monitors: drift of endpoints against their training sets, and alerts.",
    "optimization": "Optimizations: faster variants of a model, measured, accepted or refused.",
    "pipelines": "Pipelines: train anew, try beside the champion, promote or roll back.",
}
"""Every room in one line, so that the help of the root imports none of them."""


def run(arguments: Sequence[str]) -> int:
    """Run what was typed; the exit status."""
    _prepare_streams()
    if COMPLETE_VARIABLE in os.environ:
        from typer._completion_classes import completion_init

        completion_init()
    try:
        status = root().main(
            list(arguments), prog_name=PROGRAM, complete_var=COMPLETE_VARIABLE, standalone_mode=False
        )
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except (Exception, KeyboardInterrupt) as error:
        from falaj.apps.cli.output.errors import report_error

        return report_error(error)


@cache
def root() -> Any:
    """The whole command line as one command."""
    app = typer.Typer(cls=RootGroup, rich_markup_mode=None, add_completion=False, help=_globals.__doc__)
    app.callback(invoke_without_command=True, context_settings={"help_option_names": ["--help", "-h"]})(
        _globals
    )
    return typer.main.get_command(app)


class LazyCommand(TyperCommand):
    """A command of which only the name and the help are known until it is used."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return load_command(self.name or "").make_context(info_name, args, parent=parent, **extra)


class RootGroup(TyperGroup):
    """The commands for people first, then the rooms."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        told = {name: words for name, (words, _) in COMMANDS.items()} | GROUPS
        for name, words in told.items():
            self.add_command(LazyCommand(name, help=words, short_help=words, rich_markup_mode=None))
        self.add_command(
            LazyCommand("reference", help="The reference page.", hidden=True, rich_markup_mode=None)
        )

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, words) for name, (words, _) in COMMANDS.items()])
        with formatter.section("Rooms"):
            formatter.write_dl(list(GROUPS.items()))


@cache
def load_command(name: str) -> Any:
    """The command called `name`, or the group of a room's commands."""
    if name in GROUPS:
        return import_module("falaj.apps.cli.generation.groups").command_group(name, GROUPS[name])
    module = "reference" if name == "reference" else COMMANDS[name][1]
    return import_module(f"falaj.apps.cli.commands.{module}").COMMANDS[name]()


def _show_version(wanted: bool) -> None:
    if wanted:
        from falaj import __version__

        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


def _globals(
    ctx: typer.Context,
    home: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The platform in this directory. Else FALAJ_HOME, else .falaj"),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The platform at this address, with FALAJ_TOKEN. Else FALAJ_URL"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print results as JSON.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
) -> None:
    """One sovereign ML platform: features, training, models, serving, and the proof of what happened to the data."""
    ctx.obj = GlobalOptions(home, url, as_json)
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def _prepare_streams() -> None:
    """A terminal that cannot show a character gets its code instead; a stream that is closed swallows everything."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open until the process ends
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
