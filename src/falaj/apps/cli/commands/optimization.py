"""`falaj optimization`: the original model and its variants as one table, with the verdicts."""

from __future__ import annotations

from typing import Annotated

import typer

from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.names import completion_of, full_id
from falaj.apps.cli.output import results
from falaj.apps.cli.output.messages import Given, Message
from falaj.apps.cli.output.tables import show_fields, show_rows
from falaj.apps.cli.output.values import format_value, printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.optimization.budgets import format_budget
from falaj.records.control.workflows import WorkflowRun
from falaj.records.optimization import Optimization, ParetoRow
from falaj.records.sizes import format_size

PRESENTATION = Presentation(
    columns={Optimization: ("id", "model", "data", "target", "job", "created_at")},
    lists={"optimization": "optimization list"},
)


HEADINGS = (
    "variant",
    "verdict",
    "on",
    "front",
    "µs, 1 row",
    "rows/s",
    "batch",
    "size",
    "memory",
    "quality",
    "cost/million",
    "version",
)


@PRESENTATION.command("show")
def show(
    session: Session,
    optimization: Annotated[
        str,
        typer.Argument(
            metavar="OPTIMIZATION",
            help=f"An optimization: {arguments.SHORT}",
            autocompletion=completion_of("optimization"),
        ),
    ],
) -> None:
    """Show the variants of an optimization: latency, throughput, size, quality, and the verdict with its reason."""
    parsing.check(all_operations()["optimization.show"], {"optimization": optimization})
    with session.platform() as platform:
        found = platform.optimization.show(full_id(platform, "optimization", optimization))
    if session.json:
        results.show(found, as_json=True)
        return
    print_table(found)


def print_table(found: Optimization) -> None:
    """Print the request, the Pareto table, why each variant was accepted or refused, and what to serve."""
    report = found.report
    fitted = f", and learned from {report.fitted_rows} others" if report.fitted_rows else ""
    judged_by = printable(found.held_out or found.data)
    show_fields(
        {
            "model": printable(found.model),
            "metric": f"{report.metric} of {found.target} on {report.rows} rows of {judged_by}{fitted}",
            "held out": _held_out(found),
            "budget": f"{found.budget.speedup:g} times as fast, {format_budget(found.budget)}",
            "host": printable(report.host),
            "instructions": " ".join(report.instruction_set) or "-",
            "gpu": printable(report.gpu) or "-",
            "job": found.job,
            **({} if found.student is None else {"student": found.student}),
            "created": format_value(found.created_at),
        }
    )
    print()
    measured = {row.name for row in found.table}
    rows = [_cells(row, found) for row in found.table]
    rows += [
        [each.recipe, str(each.verdict), *["-"] * (len(HEADINGS) - 2)]
        for each in report.variants
        if each.recipe not in measured
    ]
    show_rows(HEADINGS, rows)
    print()
    for each in report.variants:
        print(f"{each.recipe} is {each.verdict}: {printable(each.reason)}")
    if found.recommendation is not None:
        print(f"\nrecommended  {printable(found.recommendation.words)}")


def _held_out(found: Optimization) -> str:
    """Say which rows quality was measured on, and their digest."""
    rows = found.report.held_out
    if rows is None:
        return "-"  # stored before it was recorded
    name = printable(found.held_out or found.data)
    drawn = "all" if rows.rows == rows.total else f"drawn by seed {rows.seed}"
    part = "" if rows.part == "held-out set" else f", {rows.part}"
    return f"{rows.rows} of {rows.total} rows of {name}{part} ({drawn}), sha256 {rows.digest}"


def _cells(row: ParetoRow, found: Optimization) -> list[str]:
    cost = row.cost_per_million
    return [
        row.name,
        str(row.verdict or "-"),
        row.device,
        "*" if row.on_front else "",
        f"{row.latency_p50_us:.1f}",
        f"{row.rows_per_s:,.0f}",
        str(row.best_batch),
        format_size(row.size_bytes),
        "-" if row.memory_bytes is None else format_size(row.memory_bytes),
        "-" if row.quality is None else f"{row.quality:.5f}",
        "-" if cost is None else f"{cost:.4g} {found.currency}",
        row.version or "-",
    ]


@PRESENTATION.message("optimization.start")
def _optimizing(made: WorkflowRun, given: Given) -> Message:
    return Message(
        f"work {made.id} measures variants of {given['model']}", (("next", f"workflows watch {made.id}"),)
    )
