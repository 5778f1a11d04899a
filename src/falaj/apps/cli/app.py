"""The root of the command line: its global options, and all commands, each imported only when it is used."""

from __future__ import annotations

import itertools
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
    "init": ("Create a home in a folder, with the files of the tutorial.", "init"),
    "up": ("Start the platform on this machine, in the foreground.", "platform"),
    "status": ("Show whether a platform runs on the home, and where.", "platform"),
    "down": ("Stop the platform that runs on the home.", "platform"),
    "backup": ("Copy the platform on this machine into a directory, while it runs.", "backup"),
    "restore": ("Make the home again from a backup.", "backup"),
    "doctor": ("Check the installation and the home, and suggest fixes.", "doctor"),
    "apply": ("Apply the definitions of entities and feature views in files.", "apply"),
    "train": ("Run a training script as a job, and follow it.", "train"),
    "tune": ("Search for hyperparameters of a script, with trials as jobs.", "tune"),
    "predict": ("Predict the rows of a table in batches, here or as a job.", "predictions"),
    "deploy": ("Serve a model version at an endpoint.", "endpoints_deploy"),
    "whoami": ("Show who you are on the platform, and your roles.", "whoami"),
    "login": ("Sign in to a platform, and save the credential.", "login"),
    "images": ("Build container images of the platform, of workers and of the model server.", "images"),
    "config": ("Check falaj.toml, or show it with its defaults.", "config"),
    "version": ("Print the version.", "version"),
    "completion": ("Print the completion script of a shell.", "completion"),
}
"""The help of each command, and the module in `commands` that has it under `COMMANDS`."""

GROUPS = {
    "workspaces": "Workspaces, and who holds which role in them.",
    "users": "People and service accounts.",
    "groups": "Groups of users, who hold the roles of their groups.",
    "tokens": "Tokens and sign-in links.",
    "policies": "Policies: publish, check and test them; find out who may do what.",
    "objects": "Stored objects of any kind: zone, owner, label.",
    "zones": "Zones, and what they may store.",
    "keys": "Data keys: list, rotate, destroy.",
    "secrets": "Secrets for jobs: set, list, remove; values are never shown.",
    "events": "Events: what was done on the platform; list them, watch them.",
    "webhooks": "Webhooks: receivers outside the platform that events are sent to.",
    "blobs": "Blobs: put, get, list, copy, delete.",
    "lineage": "The lineage graph: sources and descendants of an object.",
    "audit": "The audit log: list, export, prove, verify.",
    "workflows": "Long-running workflows: watch, cancel.",
    "platform": "The platform: its version, controller and metrics.",
    "experiments": "Experiments: groups of runs; create, tag, rename, delete, restore.",
    "runs": "Runs of experiments: search, compare, tag; parameters, metrics, artifacts.",
    "loggedmodels": "Logged models: models that runs made, before they are registered.",
    "uploads": "Uploads in parts: large files of runs and logged models.",
    "nodes": "Nodes that run jobs: their hardware, and what is free.",
    "clusters": "The cluster that jobs run on: its namespaces, and what its administrator applies.",
    "jobs": "Jobs: list them, read their logs, wait, cancel, retry, move, explain.",
    "queues": "Queues: quotas, borrowing and fair share of the machines, and budgets.",
    "usage": "Resources that jobs have used: GPU-hours, CPU-hours, energy and cost.",
    "features": "Features: define views, ingest rows, create training sets, read online.",
    "models": "Models: register versions, promote, approve, roll back, verify.",
    "modelversions": "Model versions: search all of them, describe and tag them.",
    "endpoints": "Endpoints: deploy model versions, route requests, read predictions and scores.",
    "monitoring": "Monitors: drift of endpoints against their training sets, and alerts.",
    "optimization": "Optimizations: faster variants of a model, measured, accepted or refused.",
    "studies": "Studies of hyperparameters: trials, the best, importance; stop, resume.",
    "predictions": "Batch predictions of tables on the platform.",
    "pipelines": "Pipelines: retrain, try as a canary, promote or roll back.",
}
"""The help of each group, here so that `falaj --help` imports none of them."""


def run(arguments: Sequence[str]) -> int:
    """Run what was typed; return the exit status."""
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
        from falaj.apps.cli.output.errors import FAILED, discard_output, report_error

        try:
            return report_error(error, as_json=_asks_for_json(arguments))
        except OSError:  # stderr is full, or nobody reads it
            discard_output()
            return FAILED


def _asks_for_json(arguments: Sequence[str]) -> bool:
    """Tell whether --json was typed; what is behind `--` belongs to a script. It is asked before anything is parsed."""
    return "--json" in itertools.takewhile(lambda word: word != "--", arguments)


@cache
def root() -> Any:
    """Return the whole command line as one command."""
    app = typer.Typer(cls=RootGroup, rich_markup_mode=None, add_completion=False, help=_globals.__doc__)
    app.callback(invoke_without_command=True, context_settings={"help_option_names": ["--help", "-h"]})(
        _globals
    )
    return typer.main.get_command(app)


class LazyCommand(TyperCommand):
    """A command that is loaded when it is used; until then it has a name and a help text."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return load_command(self.name or "").make_context(info_name, args, parent=parent, **extra)


class RootGroup(TyperGroup):
    """The root: the commands first, then the groups of operations."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        summaries = {name: summary for name, (summary, _) in COMMANDS.items()} | GROUPS
        for name, summary in summaries.items():
            self.add_command(LazyCommand(name, help=summary, short_help=summary, rich_markup_mode=None))
        self.add_command(
            LazyCommand("reference", help="The reference page.", hidden=True, rich_markup_mode=None)
        )

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (summary, _) in COMMANDS.items()])
        with formatter.section("Groups of commands"):
            formatter.write_dl(list(GROUPS.items()))


@cache
def load_command(name: str) -> Any:
    """Return the command or the group of commands called `name`."""
    if name in GROUPS:
        return import_module("falaj.apps.cli.generation.groups").command_group(name, GROUPS[name])
    module = "reference" if name == "reference" else COMMANDS[name][1]
    return import_module(f"falaj.apps.cli.commands.{module}").COMMANDS[name]()


def _show_version(is_set: bool) -> None:
    if is_set:
        from falaj import __version__

        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


def _globals(
    ctx: typer.Context,
    home: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="The platform in this directory. Else FALAJ_HOME, else .falaj here or above."
        ),
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
    """One sovereign ML platform: features, training, models, serving, and a verifiable audit log."""
    ctx.obj = GlobalOptions(home, url, as_json)
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def _prepare_streams() -> None:
    """Escape characters that a stream cannot encode; discard what is written to a closed stream."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open until the process ends
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
