"""`falaj runs import`: copy runs of an MLflow server, of its SQLite file, or of a W&B export."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from falaj.apps.cli.generation import arguments
from falaj.apps.cli.output.errors import FAILED
from falaj.apps.cli.output.progress import progress
from falaj.apps.cli.output.tables import show_rows
from falaj.apps.cli.output.values import plural, printable
from falaj.apps.cli.session import Session
from falaj.errors import Interrupted, InvalidInput, Unavailable
from falaj.records.sizes import format_size
from falaj.sdk.run_import.report import ImportCount, ImportReport
from falaj.sdk.run_import.sources import import_runs as import_source


def import_runs(
    session: Session,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="The address of an MLflow server, its SQLite file, or a W&B export in JSON lines.",
        ),
    ],
    *,
    kind: Annotated[
        str | None,
        typer.Option("--from", metavar="KIND", help="mlflow or wandb. (default: what the source looks like)"),
    ] = None,
    experiment: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this experiment or project. (may be repeated; default: all)"),
    ] = None,
    artifacts: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="The root of the artifacts. (default: those beside the SQLite file)"
        ),
    ] = None,
    no_artifacts: Annotated[bool, typer.Option("--no-artifacts", help="Leave artifacts behind.")] = False,
    prefix: Annotated[
        str, typer.Option(metavar="TEXT", help="Put this before the names of experiments.")
    ] = "",
    merge: Annotated[
        bool, typer.Option("--merge", help="Add runs to experiments that exist, of the same names.")
    ] = False,
    workspace: arguments.IN_WORKSPACE = None,
) -> int:
    """Copy runs of MLflow or W&B. It can be interrupted and repeated: only what is missing is copied."""
    if artifacts is not None and no_artifacts:
        raise InvalidInput.at("--no-artifacts", given="and --artifacts", allowed="one of them")
    with session.platform() as platform:
        try:
            report = import_source(
                platform,
                source,
                kind=kind,
                experiments=experiment or (),
                artifacts=None if artifacts is None else Path(artifacts),
                workspace=workspace,
                watch=lambda rows: progress("importing", total=rows, unit="rows"),
                prefix=prefix,
                merge=merge,
                with_files=not no_artifacts,
            )
        except (Interrupted, KeyboardInterrupt, Unavailable):
            print("the same command continues where this one ended", file=sys.stderr)
            raise
    session.show(report, partial(_show, session))
    return 0 if report.complete else FAILED


def _show(session: Session, report: ImportReport) -> None:
    rows = [
        [each.what, *(_amount(each, number) for number in (each.source, each.here)), _verdict(each)]
        for each in report.counts
    ]
    show_rows(["", "source", "here", ""], rows)
    print()
    for note in report.notes:
        print(f"note: {printable(note)}")
    for problem in report.problems:
        print(f"refused: {printable(problem)}")
    added = f"{plural(report.new_runs, 'new run')}, {plural(report.changed_runs, 'run')} completed"
    if report.complete:
        print(f"all of {report.source} is here: {added}")
        print(f"  see    {session.full_command('runs list')}")
    else:
        print(f"not all of {report.source} is here: {added}; the same command tries again")


def _amount(count: ImportCount, number: int) -> str:
    return format_size(number) if count.what.endswith("bytes") else f"{number:,}"


def _verdict(count: ImportCount) -> str:
    return "" if count.source == count.here else "differs"
