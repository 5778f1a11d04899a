"""`falaj runs`: runs of experiments, with parameters, metrics and artifacts."""

from __future__ import annotations

from typing import Annotated

import typer

from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.operations import show_page
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.names import completion_of, full_id
from falaj.apps.cli.output.tables import show_fields, show_rows
from falaj.apps.cli.output.values import format_elapsed, format_number, format_value, printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.records.sizes import format_size
from falaj.records.tracking import Run, RunDetails

PRESENTATION = Presentation(
    help={"sources": "What it was made from: an id, or kind:name."}, examples={"sources": "blob:NAME"}
)


RUN = Annotated[
    str,
    typer.Argument(metavar="RUN", help=f"A run: {arguments.SHORT}", autocompletion=completion_of("run")),
]


@PRESENTATION.command("show")
def show_run(session: Session, run: RUN) -> None:
    """Show a run with its parameters, tags, artifacts and summaries of its metrics."""
    parsing.check(all_operations()["runs.show"], {"run": run})
    with session.platform() as platform:
        found = platform.runs.show(full_id(platform, "run", run))
    session.show(found, _show_details)


@PRESENTATION.command("list")
def list_runs(
    session: Session,
    experiment: Annotated[
        str,
        typer.Argument(
            metavar="EXPERIMENT",
            help="An experiment: its name or id. That of a job has the name of the job.",
            autocompletion=completion_of("experiment"),
        ),
    ],
    *,
    status: Annotated[
        str | None, typer.Option(metavar="STATUS", help="running, finished, failed or killed.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="WHERE", help="A condition, such as metrics.auc>0.9 (may be repeated)"),
    ] = None,
    after: arguments.AFTER = "",
    limit: arguments.LIMIT = "100",
    everything: arguments.ALL = False,
) -> None:
    """List the runs of an experiment that meet every condition, newest first."""
    typed = {"experiment": experiment, "status": status, "where": where, "after": after, "limit": limit}
    show_page(session, "runs.list", typed, _show_runs, everything=everything)


def _show_runs(found: tuple[Run, ...]) -> None:
    rows = [
        [
            each.id,
            each.name,
            each.status.value,
            format_value(each.started_at),
            format_elapsed(each.started_at, each.ended_at),
        ]
        for each in found
    ]
    show_rows(["id", "name", "status", "started", "took"], rows)


def _show_details(found: RunDetails) -> None:
    run = found.run
    show_fields(
        {
            "name": run.name,
            "id": run.id,
            "status": run.status.value,
            "started": format_value(run.started_at),
            "took": format_elapsed(run.started_at, run.ended_at),
            "label": format_value(run.label),
        }
        | {f"tag {each.key}": printable(each.value) for each in found.tags}
    )
    _table(["parameter", "value"], [[each.key, printable(each.value)] for each in found.params])
    _table(
        ["metric", "last", "at step", "lowest", "highest", "points"],
        [
            [
                each.key,
                format_number(each.last),
                str(each.last_step),
                format_number(each.low),
                format_number(each.high),
                str(each.points),
            ]
            for each in found.metrics
        ],
    )
    _table(
        ["artifact", "size", "blob"],
        [[each.path, format_size(each.size_bytes), each.blob] for each in found.artifacts],
    )


def _table(headings: list[str], rows: list[list[str]]) -> None:
    if rows:
        print()
        show_rows(headings, rows)
