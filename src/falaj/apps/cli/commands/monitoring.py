"""`falaj monitoring`: watch endpoints for drift, and print reports as tables."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.messages import Given, Message
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.tables import show_rows
from falaj.apps.cli.output.values import plural, printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.records.monitoring.monitors import Alert, Monitor, MonitorRemoval, MonitorReport
from falaj.records.monitoring.sketches import DriftReport, ModelDrift, Statistic

PRESENTATION = Presentation(
    columns={
        Alert: ("id", "state", "version", "columns", "since", "until", "rows", "windows"),
        Monitor: ("name", "endpoint", "training_set", "reference_rows", "alert", "created_at", "id"),
    },
    lists={"alert": "monitoring alerts", "monitor": "monitoring list"},
)


MONITOR = Annotated[str, typer.Argument(metavar="MONITOR", help="A monitor: its name or id.")]
SPELLING = {"window": "--rows or --every", "columns": "--column"}


@PRESENTATION.command("watch")
def watch(
    session: Session,
    endpoint: arguments.ENDPOINT,
    *,
    reference: Annotated[
        str, typer.Option(metavar="TRAINING_SET", help="The training set that it is compared with.")
    ],
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Watch these only. (may be repeated)"),
    ] = None,
    rows: Annotated[
        str | None, typer.Option(metavar="ROWS", help="The minimum rows of a window. (default 1000)")
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="The minimum duration of a window. (such as 30d, 12h or 90s)"),
    ] = None,
    independent_rows: Annotated[
        bool,
        typer.Option(
            "--independent-rows", help="Rows do not depend on each other over time, as in a replay."
        ),
    ] = False,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Its name, if not the endpoint's.")] = None,
    workspace: Annotated[
        str | None, typer.Option(metavar="WORKSPACE", help="A workspace: its name or id.")
    ] = None,
) -> None:
    """Compare the requests and predictions of an endpoint with a training set, and raise an alert on drift."""
    operation = all_operations()["monitoring.watch"]
    typed = {"endpoint": endpoint, "reference": reference, "name": name, "workspace": workspace}
    given = parsing.parse(operation, typed | {"columns": column or None})
    if rows is not None or every is not None:
        given["window"] = _window(rows, every)
    if independent_rows:
        given["budget"] = {"dependence": "none"}
    parsing.check(operation, given, spelling=SPELLING)
    with session.platform() as platform:
        made = platform.monitoring.watch(**given)
    if session.json:
        show(made, as_json=True)
        return
    print(f"{made.name} compares {endpoint} with {reference}: {_size(made)}")
    print(f"  next   {session.full_command(f'monitoring check {made.name}')}")


@PRESENTATION.command("check")
def check(
    session: Session,
    monitor: MONITOR,
    *,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Windows from this moment on.")] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Windows before this moment.")] = None,
) -> None:
    """Show the drift of an endpoint from its training set, column by column, the largest first."""
    operation = all_operations()["monitoring.check"]
    given = parsing.parse(operation, {"monitor": monitor, "since": since, "until": until})
    parsing.check(operation, given)
    with session.platform() as platform:
        report = platform.monitoring.check(**given)
    if session.json:
        show(report, as_json=True)
    else:
        _print_report(report)


def _window(rows: str | None, every: str | None) -> dict[str, Any]:
    """Return the fields of the window that were typed; the operation validates them."""
    found: dict[str, Any] = {}
    if rows is not None:
        found["rows"] = rows
    if every is not None:
        found["duration"] = parsing.parse_duration(every, "--every")
    return found


def _size(made: Monitor) -> str:
    which = "all columns that both have" if made.all_columns else ", ".join(made.columns)
    return f"{made.reference_rows} rows, {printable(which)}"


def _print_report(report: MonitorReport) -> None:
    for look in report.looks:
        print(printable(look.words))
        span = f"{look.since:%Y-%m-%d %H:%M:%SZ} to {look.until:%Y-%m-%d %H:%M:%SZ}"
        print(f"  {span}, compared with {printable(look.training_set)}")
        _columns(look)
    if not report.looks:
        print(printable(f"{report.name}: {report.words}"))


def _columns(look: ModelDrift) -> None:
    headings = ["COLUMN", "VERDICT", "EFFECT", "PSI", "KS", "ROWS", "WHY"]
    show_rows(headings, [_row(report) for report in look.reports])


def _row(report: DriftReport) -> list[str]:
    found = {item.statistic: f"{item.value:.3f}/{item.threshold:.3f}" for item in report.evidence}
    return [
        printable(report.name),
        report.verdict.replace("_", " "),
        f"{report.effect:.2f}" if report.evidence else "-",
        found.get(Statistic.PSI, "-"),
        found.get(Statistic.KS, "-"),
        _rows(report),
        printable(report.words.partition(": ")[2]) if not report.evidence else "",
    ]


def _rows(report: DriftReport) -> str:
    """Return the rows of the window, and as how many independent ones they count; "?" where that is not known."""
    if not report.evidence:
        return str(report.window_rows)
    effective = "?" if report.effective_rows is None else str(report.effective_rows)
    return f"{report.window_rows} ~ {effective}"


@PRESENTATION.message("monitoring.set_reference")
def _rebased(made: Monitor, given: Given) -> Message:
    words = (
        f"{made.name} compares with {given['reference']} from now on: {plural(made.reference_rows, 'row')}"
    )
    return Message(words, (("next", f"monitoring check {made.name}"),))


@PRESENTATION.message("monitoring.remove")
def _unwatched(made: MonitorRemoval, given: Given) -> Message:
    return Message(f"monitor {given['monitor']} is removed; its alerts are kept")


@PRESENTATION.message("monitoring.acknowledge")
def _acknowledged(made: Alert, given: Given) -> Message:
    words = f"alert {made.id} is acknowledged; if the drift continues, the next window raises a new one"
    return Message(words, (("next", f"monitoring alert {made.id}"),))
