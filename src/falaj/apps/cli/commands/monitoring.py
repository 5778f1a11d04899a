"""`falaj monitoring watch` and `check`: windows as people type them, and a report as a table."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from falaj.apps.cli.generation import parsing
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.tables import show_rows
from falaj.apps.cli.output.values import printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.records.monitoring.monitors import Monitor, MonitorReport
from falaj.records.monitoring.sketches import DriftReport, ModelDrift, Statistic

MONITOR = Annotated[str, typer.Argument(metavar="MONITOR", help="A monitor: its name or id.")]
SPELLING = {"window": "--rows or --every", "columns": "--column"}


def watch(
    session: Session,
    endpoint: Annotated[str, typer.Argument(metavar="ENDPOINT", help="An endpoint: its name or id.")],
    *,
    reference: Annotated[str, typer.Option(metavar="TRAINING_SET", help="What it is compared with.")],
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Watch these only. (may be repeated)"),
    ] = None,
    rows: Annotated[
        str | None, typer.Option(metavar="ROWS", help="A window has so many rows at least. (default 1000)")
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="A window lasts so long at least. (such as 30d, 12h or 90s)"),
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Its name, if not the endpoint's.")] = None,
    workspace: Annotated[
        str | None, typer.Option(metavar="WORKSPACE", help="A workspace: its name or id.")
    ] = None,
) -> None:
    """Compare what an endpoint sees and answers with a training set, and raise an alert when it drifts."""
    operation = all_operations()["monitoring.watch"]
    typed = {"endpoint": endpoint, "reference": reference, "name": name, "workspace": workspace}
    given = parsing.parse(operation, typed | {"columns": column or None})
    if rows is not None or every is not None:
        given["window"] = _window(rows, every)
    parsing.check(operation, given, spelling=SPELLING)
    with session.platform() as platform:
        made = platform.monitoring.watch(**given)
    if session.json:
        show(made, as_json=True)
        return
    print(f"{made.name} watches {endpoint} beside {reference}: {_size(made)}")
    print(f"  next   {session.full_command(f'monitoring check {made.name}')}")


def check(
    session: Session,
    monitor: MONITOR,
    *,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="From this moment on.")] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Before this moment.")] = None,
) -> None:
    """Say whether an endpoint still looks like its training set, column by column, the largest drift first."""
    operation = all_operations()["monitoring.check"]
    given = parsing.parse(operation, {"monitor": monitor, "since": since, "until": until})
    parsing.check(operation, given)
    with session.platform() as platform:
        report = platform.monitoring.check(**given)
    if session.json:
        show(report, as_json=True)
    else:
        _tell(report)


def _window(rows: str | None, every: str | None) -> dict[str, Any]:
    """The window that was typed; its own check says what is wrong with it."""
    found: dict[str, Any] = {}
    if rows is not None:
        found["rows"] = rows
    if every is not None:
        found["duration"] = parsing.parse_duration(every, "--every")
    return found


def _size(made: Monitor) -> str:
    which = "all columns that both have" if made.all_columns else ", ".join(made.columns)
    return f"{made.reference_rows} rows, {printable(which)}"


def _tell(report: MonitorReport) -> None:
    for look in report.looks:
        print(printable(look.words))
        span = f"{look.since:%Y-%m-%d %H:%M:%SZ} to {look.until:%Y-%m-%d %H:%M:%SZ}"
        print(f"  {span}, beside {printable(look.training_set)}")
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
        str(report.window_rows),
        printable(report.words.partition(": ")[2]) if not report.evidence else "",
    ]


GROUP_COMMANDS = {"watch": watch, "check": check}
