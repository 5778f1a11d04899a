"""`falaj usage`: what jobs have used, by job, user, workspace or queue, and its export as CSV."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from falaj.apps.cli.generation import parsing
from falaj.apps.cli.generation.operations import present
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.tables import show_rows
from falaj.apps.cli.output.values import format_value, printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import InvalidInput
from falaj.records.durations import read_duration
from falaj.records.scheduling.accounting import UsageReport, UsageRow

PRESENTATION = Presentation(default="show")


BY = Annotated[str, typer.Option(metavar="BY", help="job, user, workspace or queue.")]
SINCE = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="A moment, or 30d for thirty days ago. (default: the start of this month, in UTC)",
    ),
]
UNTIL = Annotated[
    str | None, typer.Option(metavar="TIME", help="A moment, or 7d for seven days ago. (default: now)")
]
WORKSPACE = Annotated[str | None, typer.Option(metavar="WORKSPACE", help="Of this workspace only.")]
LIMIT = Annotated[str, typer.Option(metavar="LIMIT", help="At most so many lines.")]
OUT = Annotated[
    str | None, typer.Option("--out", metavar="FILE", help="Write here instead of standard output.")
]


@PRESENTATION.command("show")
def show_usage(
    session: Session,
    *,
    by: BY = "workspace",
    since: SINCE = None,
    until: UNTIL = None,
    workspace: WORKSPACE = None,
    limit: LIMIT = "100",
) -> None:
    """Show GPU-hours, CPU-hours, energy and cost, in the workspaces that you may see."""
    operation = all_operations()["usage.show"]
    typed = {"by": by, "workspace": workspace, "limit": limit, **_span(since, until)}
    given = parsing.parse(operation, typed)
    parsing.check(operation, given)
    with session.platform() as platform:
        found = platform.usage.show(**given)
    session.show(found, print_report)


@PRESENTATION.command("export")
def export_usage(
    session: Session,
    *,
    since: SINCE = None,
    until: UNTIL = None,
    workspace: WORKSPACE = None,
    out: OUT = None,
) -> None:
    """Export the usage as CSV with the columns of FOCUS 1.2: a row for each charge, safe to open in a spreadsheet."""
    operation = all_operations()["usage.export"]
    given = parsing.parse(operation, {"workspace": workspace, **_span(since, until)})
    parsing.check(operation, given)
    with session.platform() as platform:
        present(session, operation, given, platform.usage.export(**given), to=out or "-")
    if out:
        print(f"written to {out}", file=sys.stderr)


def print_report(found: UsageReport) -> None:
    """Print a table, its total, and what the figures do not cover."""
    print(f"{format_value(found.since)} to {format_value(found.until)}")
    headings = [found.by, *(["workspace"] if found.by == "job" else []), "attempts", "GPU-hours", "CPU-hours"]
    lines = [*found.lines, found.total]
    wide = found.by == "job"
    show_rows([*headings, "energy kWh", "cost"], [_row(each, with_workspace=wide) for each in lines])
    if found.left_out:
        print(f"{found.left_out} more rows are in the total, but not shown", file=sys.stderr)
    total = found.total
    if total.unmeasured_gpu_hours or total.unmeasured_cpu_hours:
        print(
            f"the energy of {total.unmeasured_gpu_hours:.2f} GPU-hours and {total.unmeasured_cpu_hours:.2f} CPU-hours "
            "was not measured, or is not known yet",
            file=sys.stderr,
        )
    if not total.costs and total.attempts:
        print("no prices are set: [prices] in falaj.toml", file=sys.stderr)


def _row(each: UsageRow, *, with_workspace: bool) -> list[str]:
    running = f" ({each.running} running)" if each.running else ""
    return [
        printable(each.name if each.name == each.id or not with_workspace else f"{each.name} {each.id}"),
        *([printable(each.workspace or "")] if with_workspace else []),
        f"{each.attempts}{running}",
        f"{each.gpu_hours:.2f}",
        f"{each.cpu_hours:.2f}",
        "-" if each.energy_kwh is None else f"{each.energy_kwh:.3f}",
        ", ".join(f"{cost:.2f} {currency}" for currency, cost in each.costs.items()) or "-",
    ]


def _span(since: str | None, until: str | None) -> dict[str, Any]:
    return {"since": _moment(since, "--since"), "until": _moment(until, "--until")}


def _moment(text: str | None, where: str) -> Any:
    """Return the moment: `7d` is seven days ago; a moment without an offset is in UTC."""
    if text is None:
        return None
    if (ago := read_duration(text)) is not None:
        return datetime.now(UTC) - ago
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        allowed = "a moment like 2026-03-01 or 2026-03-01T12:00Z, or a duration like 30d for that long ago"
        raise InvalidInput.at(where, given=text, allowed=allowed, fix=f"{where} 30d") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
