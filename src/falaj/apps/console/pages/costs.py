"""Costs: GPU- and CPU-hours, money and energy by workspace, user, queue or job, and budgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import get_args

from nicegui import ui

from falaj.apps.console.charts.bars import Bar, bar_chart
from falaj.apps.console.charts.element import chart
from falaj.apps.console.charts.palette import palette
from falaj.apps.console.components.states import empty_state
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.platform_events import follow_platform
from falaj.apps.console.pages.queues.budgets import BudgetLine, budget_lines, draw_budget_form, draw_budgets
from falaj.apps.console.times import Times, number
from falaj.errors import FalajError
from falaj.records.record import utc_now
from falaj.records.scheduling.accounting import BudgetState, By, UsageReport, UsageRow
from falaj.sdk.platform import Platform

BYS: dict[str, str] = {"workspace": "by workspace", "user": "by user", "queue": "by queue", "job": "by job"}
SPANS = {"month": "This month", "7d": "Last 7 days", "30d": "Last 30 days", "90d": "Last 90 days"}
SCOPES = {"all": "All workspaces that you may see", "here": "This workspace"}
BARS = 12
"""So many of the largest are drawn; the table has all."""
CSV_BYTES = 32 << 20
"""A larger export is refused here: the command line writes it to a file."""
COLUMNS = (
    TableColumn("name", "Name"),
    TableColumn("gpu_hours", "GPU-hours", "number"),
    TableColumn("cpu_hours", "CPU-hours", "number"),
    TableColumn("cost", "Cost", "number"),
    TableColumn("energy", "Energy [kWh]", "number"),
    TableColumn("unmeasured", "Without a measurement"),
    TableColumn("attempts", "Attempts", "number"),
    TableColumn("running", "Running", "number"),
)


@dataclass(frozen=True)
class CostQuery:
    """What the address asks for."""

    by: str = "workspace"
    span: str = "month"
    scope: str = "all"

    @classmethod
    def of(cls, query: Mapping[str, str]) -> CostQuery:
        given = cls(query.get("by", ""), query.get("span", ""), query.get("scope", ""))
        return cls(
            given.by if given.by in get_args(By) else "workspace",
            given.span if given.span in SPANS else "month",
            given.scope if given.scope in SCOPES else "all",
        )

    def fields(self) -> dict[str, str]:
        """Return the same as parts of an address."""
        return {"by": self.by, "span": self.span, "scope": self.scope}

    def since(self, now: datetime) -> datetime | None:
        """Return when the time range begins; none: with the month."""
        return None if self.span == "month" else now - timedelta(days=int(self.span.removesuffix("d")))


@dataclass(frozen=True)
class CostPlot:
    """Bars of one unit, the largest first; `parts` are currencies for money."""

    name: str
    unit: str
    parts: tuple[str, ...]
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class CostsView:
    span: str
    totals: tuple[tuple[str, str], ...]
    plots: tuple[CostPlot, ...]
    columns: tuple[TableColumn, ...]
    rows: tuple[TableRow, ...]
    left_out: int
    budgets: tuple[BudgetLine, ...]


def costs_view(report: UsageReport, budgets: Sequence[BudgetState], *, times: Times, base: str) -> CostsView:
    """Return what the page shows; `base` is the address of the page of a job, without its id."""
    is_by_job = report.by == "job"
    first = TableColumn("name", report.by.capitalize(), "link" if is_by_job else "text")
    return CostsView(
        span=f"{times.moment(report.since)} to {times.moment(report.until)}",
        totals=_totals(report.total),
        plots=_plots(report.lines),
        columns=(first, *COLUMNS[1:]),
        rows=tuple(_row(line, f"{base}/{line.id}" if is_by_job else "") for line in report.lines),
        left_out=report.left_out,
        budgets=budget_lines(budgets, times),
    )


def _totals(total: UsageRow) -> tuple[tuple[str, str], ...]:
    costs = [(f"{number(amount)} {currency}", "cost") for currency, amount in sorted(total.costs.items())]
    energy = "not measured" if total.energy_kwh is None else f"{number(total.energy_kwh)} kWh"
    return (
        (number(total.gpu_hours), "GPU-hours"),
        (number(total.cpu_hours), "CPU-hours"),
        *(costs or [("no prices set", "cost")]),
        (energy, "energy"),
        (f"{total.attempts:,}", "attempts"),
    )


def _plots(lines: Sequence[UsageRow]) -> tuple[CostPlot, ...]:
    currencies = tuple(sorted({currency for line in lines for currency in line.costs}))
    wanted: tuple[tuple[str, str, tuple[str, ...], Callable[[UsageRow], tuple[float, ...]]], ...] = (
        ("GPU-hours", "GPU-hours", ("GPU-hours",), lambda line: (line.gpu_hours,)),
        ("CPU-hours", "CPU-hours", ("CPU-hours",), lambda line: (line.cpu_hours,)),
        (
            "Money",
            ", ".join(currencies),
            currencies,
            lambda line: tuple(line.costs.get(each, 0.0) for each in currencies),
        ),
        ("Energy", "kWh", ("energy",), lambda line: (line.energy_kwh or 0.0,)),
    )
    found = []
    for name, unit, parts, values in wanted:
        bars = [Bar(line.name[:60], tuple(round(each, 4) for each in values(line))) for line in lines]
        shown = sorted((bar for bar in bars if any(bar.parts)), key=lambda bar: -sum(bar.parts))[:BARS]
        if shown:
            found.append(CostPlot(name, unit, parts, tuple(shown)))
    return tuple(found)


def _row(line: UsageRow, target: str) -> TableRow:
    missing = [
        f"{number(hours)} {unit}"
        for hours, unit in (
            (line.unmeasured_gpu_hours, "GPU-hours"),
            (line.unmeasured_cpu_hours, "CPU-hours"),
        )
        if hours
    ]
    where = f"{line.workspace}/" if line.workspace else ""
    cells = {
        "name": where + line.name,
        "gpu_hours": number(line.gpu_hours),
        "cpu_hours": number(line.cpu_hours),
        "cost": ", ".join(f"{number(amount)} {currency}" for currency, amount in line.costs.items()) or "–",
        "energy": number(line.energy_kwh),
        "unmeasured": ", ".join(missing) or "–",
        "attempts": f"{line.attempts:,}",
        "running": f"{line.running:,}",
    }
    return TableRow(line.id, cells, target)


# ------------------------------------------------------------------------------------------- drawing


def collect_csv(p: Platform, since: datetime | None, workspace: str | None) -> bytes | None:
    """Return the usage as CSV; none if it is larger than the console hands out."""
    found = bytearray()
    for piece in p.usage.export(since=since, workspace=workspace):
        found += piece
        if len(found) > CSV_BYTES:
            return None
    return bytes(found)


class CostsPage:
    """The open page: what is chosen, and the region that shows it."""

    def __init__(self, context: PageContext) -> None:
        self.context = context
        self.query = CostQuery.of(context.query)

    @property
    def only(self) -> str | None:
        return self.context.workspace if self.query.scope == "here" else None

    async def load(self) -> CostsView:
        query, only, context = self.query, self.only, self.context
        since = query.since(utc_now().replace(second=0, microsecond=0))

        def ask(p: Platform) -> CostsView:
            by: By = query.by  # type: ignore[assignment]
            report = p.usage.show(by=by, since=since, workspace=only, limit=500)
            budgets = p.queues.budgets(workspace=only)
            return costs_view(report, budgets, times=context.times, base=context.href("jobs"))

        return await context.ask(ask)

    async def change(self, **changes: str) -> None:
        """Show something else, and put it into the address."""
        self.query = replace(self.query, **changes)
        ui.navigate.history.push(self.context.href("costs", **self.query.fields()))
        await self.region.refresh()

    async def download(self) -> None:
        """Hand out the charges as CSV in the columns of FOCUS."""
        since, only = self.query.since(utc_now()), self.only
        try:
            found = await self.context.ask(lambda p: collect_csv(p, since, only))
        except FalajError as error:
            ui.notify(error.message, type="negative")
            return
        if found is None:
            ui.notify(
                "This export is large. Write it to a file: falaj usage export > usage.csv", type="warning"
            )
            return
        ui.download.content(found, "usage.csv", "text/csv")

    async def draw(self) -> None:
        ui.label("Costs").classes("title").props("role=heading aria-level=1")
        with ui.element("div").classes("toolbar"):
            for field, options in (("by", BYS), ("span", SPANS), ("scope", SCOPES)):
                chooser = ui.select(
                    options,
                    value=getattr(self.query, field),
                    on_change=lambda event, field=field: self.change(**{field: str(event.value)}),
                )
                chooser.props("dense outlined").classes("chooser").props["aria-label"] = field
            ui.element("div").classes("grow")
            ui.button("Download CSV (FOCUS 1.2)", icon="download", on_click=self.download).props(
                "outline dense"
            )
        self.region = await self.context.region(self.load, self.show, events=("jobs.*", "queues.set_budget"))
        follow_platform(self.context, ("queues.set_budget",), self.region)
        may = await self.context.may("workspace:platform")
        with ui.element("div").classes("toolbar spaced"):
            draw_budget_form(self.context, may, self.refresh)

    async def refresh(self) -> None:
        await self.region.refresh()

    def show(self, view: CostsView) -> None:
        ui.label(view.span).classes("muted small")
        with ui.element("div").classes("panel figures"):
            for value, name in view.totals:
                with ui.column().classes("tight"):
                    ui.label(value).classes("figure wrap")
                    ui.label(name).classes("muted small")
        if not view.rows:
            empty_state("No job ran in this time.", command="falaj train train.py", icon="payments")
        colours = palette(self.context.is_dark)
        with ui.element("div").classes("columns"):
            for plot in view.plots:
                with ui.element("section").classes("panel"):
                    ui.label(plot.name).classes("panel-title").props("role=heading aria-level=2")
                    title = f"{plot.name} {BYS[self.query.by]}, the largest first"
                    options = bar_chart(plot.bars, plot.parts, colours, title=title, unit=plot.unit)
                    chart(options, height_px=110 + 30 * len(plot.bars))
        if view.rows:
            with ui.element("section").classes("panel spaced"):
                ui.label(f"Usage {BYS[self.query.by]}").classes("panel-title").props(
                    "role=heading aria-level=2"
                )
                data_table(view.columns, view.rows, title=f"Usage {BYS[self.query.by]}")
                if view.left_out:
                    ui.label(f"{view.left_out:,} more are in the totals and in the CSV.").classes(
                        "muted small"
                    )
        with ui.element("section").classes("panel spaced"):
            ui.label("Budgets").classes("panel-title").props("role=heading aria-level=2")
            draw_budgets(view.budgets)


async def draw(context: PageContext) -> None:
    """Draw the page."""
    await CostsPage(context).draw()


PAGE = ConsolePage(
    "/w/{workspace}/costs",
    "Costs",
    draw,
    entry="costs",
    reads=("usage.show", "usage.export", "queues.budgets"),
    actions=("queues.set_budget",),
)
