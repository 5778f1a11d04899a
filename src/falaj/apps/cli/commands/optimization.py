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
from falaj.records.control.workflows import WorkflowRun
from falaj.records.optimization import Measurement, Optimization
from falaj.records.sizes import format_size

PRESENTATION = Presentation(
    columns={Optimization: ("id", "model", "data", "target", "job", "created_at")},
    lists={"optimization": "optimization list"},
)


HEADINGS = (
    "variant",
    "verdict",
    "p50 µs",
    "p99 µs",
    "rows/s ×32",
    "rows/s ×256",
    "size",
    "loss",
    "auc",
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
    """Print the request, the table, and why each variant was accepted or refused."""
    report = found.report
    show_fields(
        {
            "model": printable(found.model),
            "metric": f"{report.metric} of {found.target} on {report.rows} rows of {printable(found.data)}",
            "budget": f"{found.budget.speedup:g} times as fast, at most {found.budget.worse:.1%} worse",
            "host": printable(report.host),
            "job": found.job,
            "created": format_value(found.created_at),
        }
    )
    print()
    rows = [["original", "-", *_cells(report.original), printable(found.model)]]
    rows += [
        [each.recipe, str(each.verdict), *_cells(each.measured), each.version or "-"]
        for each in report.variants
    ]
    show_rows(HEADINGS, rows)
    print()
    for each in report.variants:
        print(f"{each.recipe} is {each.verdict}: {printable(each.reason)}")


def _cells(measured: Measurement | None) -> list[str]:
    if measured is None:
        return ["-"] * 7
    return [
        f"{measured.latency_p50_us:.1f}",
        f"{measured.latency_p99_us:.1f}",
        f"{measured.rows_per_s_32:,.0f}",
        f"{measured.rows_per_s_256:,.0f}",
        format_size(measured.size_bytes),
        "-" if measured.loss is None else f"{measured.loss:.5f}",
        "-" if measured.auc is None else f"{measured.auc:.5f}",
    ]


@PRESENTATION.message("optimization.start")
def _optimizing(made: WorkflowRun, given: Given) -> Message:
    return Message(
        f"work {made.id} measures variants of {given['model']}", (("next", f"workflows watch {made.id}"),)
    )
