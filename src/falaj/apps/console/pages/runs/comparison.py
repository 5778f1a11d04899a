"""Runs side by side: curves in one chart, parallel coordinates, the parameters that differ, and all metrics."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.charts.element import chart
from falaj.apps.console.charts.grids import Dimension, parallel_coordinates
from falaj.apps.console.charts.palette import palette
from falaj.apps.console.components.states import empty_state
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.runs.curves import FOLLOW_S, SYSTEM, CurvePanel, CurveQuery
from falaj.apps.console.times import Times, duration, number
from falaj.records.tracking import INT64_MAX, INT64_MIN, ListedRun, MetricCurve, Run, RunDetails
from falaj.records.tuning import default_direction
from falaj.sdk.platform import Platform

MOST_RUNS = 30
OFFERED = 200
"""The newest runs that can be chosen."""
MOST_DIMENSIONS = 12
LOG_RANGE = 100.0
"""Numbers above 0 that differ by so much get a logarithmic axis."""

Value = float | str | None


@dataclass(frozen=True)
class Axis:
    """A dimension of parallel coordinates: its name, its words if it has no numbers, and the value of each run."""

    name: str
    words: tuple[str, ...] | None
    log: bool
    values: tuple[Value, ...]


@dataclass(frozen=True)
class ComparedRow:
    """A parameter, metric or fact, with the value of each run; `differs` if not all have the same."""

    name: str
    values: tuple[str, ...]
    differs: bool


@dataclass(frozen=True)
class ComparisonView:
    """What the page shows beside the curves."""

    runs: tuple[tuple[str, str], ...]
    """Ids and names."""
    facts: tuple[ComparedRow, ...]
    params: tuple[ComparedRow, ...]
    metrics: tuple[ComparedRow, ...]
    metric_keys: tuple[str, ...]
    axes: tuple[Axis, ...]
    coloured_by: int | None
    """The axis that colours the lines: the first metric."""
    is_running: bool


def comparison_view(
    found: Sequence[RunDetails], *, times: Times, only_differences: bool = True
) -> ComparisonView:
    """Return how runs differ."""
    params = [{each.key: each.value for each in details.params} for details in found]
    metrics = [{each.key: each.last for each in details.metrics} for details in found]
    param_keys = sorted({key for each in params for key in each})
    metric_keys = tuple(dict.fromkeys(each.key for details in found for each in details.metrics))
    compared = tuple(_row(key, [each.get(key, "–") for each in params]) for key in param_keys)
    differing = [row.name for row in compared if row.differs]
    own = [key for key in metric_keys if not key.startswith(SYSTEM)]
    axes = [axis_of(key, [each.get(key) for each in params]) for key in differing]
    axes = [each for each in axes if len({*each.values} - {None}) > 1]  # one value and gaps tell nothing
    axes = axes[: MOST_DIMENSIONS - min(len(own), 4)]
    measured = [
        axis_of(key, [_number(each.get(key)) for each in metrics])
        for key in own[: MOST_DIMENSIONS - len(axes)]
    ]
    return ComparisonView(
        runs=distinct_names([details.run for details in found], times),
        facts=(
            _row("status", [str(details.run.status) for details in found]),
            _row("started", [times.moment(details.run.started_at) for details in found]),
            _row("duration", [duration(_length(details)) for details in found]),
            _row("code", [_commit(details) for details in found]),
        ),
        params=tuple(row for row in compared if row.differs or not only_differences),
        metrics=tuple(_metric_row(key, [each.get(key) for each in metrics]) for key in metric_keys),
        metric_keys=metric_keys,
        axes=(*axes, *measured) if len(found) > 1 else (),
        coloured_by=len(axes) if measured else None,
        is_running=any(not details.run.status.ended for details in found),
    )


def distinct_names(runs: Sequence[Run], times: Times) -> tuple[tuple[str, str], ...]:
    """Return ids and names; runs of the same name are told apart by when they started, or else by their ids."""
    marks = [("", times.clock(run.started_at), times.moment(run.started_at), run.id) for run in runs]
    named = [
        [f"{run.name} ({mark})" if mark else run.name for mark in of_run]
        for run, of_run in zip(runs, marks, strict=True)
    ]
    seen = Counter(name for names in named for name in names)
    return tuple(
        (run.id, next((name for name in names if seen[name] == 1), names[-1]))
        for run, names in zip(runs, named, strict=True)
    )


def axis_of(name: str, values: Sequence[str | float | None]) -> Axis:
    """Return a dimension: of numbers where all values are, else of words."""
    numbers = [_number(each) for each in values]
    if all(number is not None or value is None for number, value in zip(numbers, values, strict=True)):
        some = [each for each in numbers if each is not None]
        log = bool(some) and min(some) > 0 and max(some) / min(some) >= LOG_RANGE
        return Axis(name, None, log, tuple(numbers))
    words = tuple(dict.fromkeys(str(each)[:60] for each in values if each is not None))
    return Axis(name, words, False, tuple(None if each is None else str(each)[:60] for each in values))


def _number(value: str | float | None) -> float | None:
    if value is None:
        return None
    try:
        found = float(value)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def _row(name: str, values: Sequence[str]) -> ComparedRow:
    return ComparedRow(name, tuple(values), len({*values}) > 1)


def _metric_row(key: str, values: Sequence[float | None]) -> ComparedRow:
    """Return the last values of a metric; the best of several has a star."""
    judged = () if key.startswith(SYSTEM) else values
    known = [each for each in judged if each is not None and math.isfinite(each)]
    best = (min if default_direction(key) == "minimize" else max)(known) if len({*known}) > 1 else None
    shown = [number(each) + (" ★" if each is not None and each == best else "") for each in values]
    return _row(key, shown)


def _length(details: RunDetails) -> float | None:
    ended = details.run.ended_at
    return None if ended is None else (ended - details.run.started_at).total_seconds()


def _commit(details: RunDetails) -> str:
    tags = {each.key: each.value for each in details.tags}
    return (tags.get("git.commit") or tags.get("mlflow.source.git.commit") or "–")[:12]


def chosen_runs(query: Mapping[str, str]) -> tuple[str, ...]:
    """Return the runs in the address, each once."""
    return tuple(dict.fromkeys(part for part in query.get("runs", "").split(",") if part))[:MOST_RUNS]


# ------------------------------------------------------------------------------------------- drawing


class ComparisonPage:
    """The open page of a comparison."""

    def __init__(self, context: PageContext) -> None:
        self.context = context
        self.ids = chosen_runs(context.query)
        self.only_differences = context.query.get("all", "") != "1"
        self.view: ComparisonView | None = None

    async def load(self) -> ComparisonView:
        """Ask for all runs at once."""
        found = await asyncio.gather(*(self.context.ask(_shown(ident)) for ident in self.ids))
        self.view = comparison_view(found, times=self.context.times, only_differences=self.only_differences)
        return self.view

    def address(self, query: CurveQuery) -> str:
        more = {"runs": ",".join(self.ids), "all": "" if self.only_differences else "1"}
        return self.context.href("compare", **more, **query.fields())

    async def draw(self) -> None:
        context = self.context
        ui.label("Compare runs").classes("title").props("role=heading aria-level=1")
        here = context.workspace
        offered = await context.ask(lambda p: p.runs.list(workspace=here, limit=OFFERED).items)
        self._chooser(offered)
        if len(self.ids) < 2:
            empty_state("Choose two runs or more.", icon="compare_arrows")
            if not self.ids:
                return
        view = await self.load()
        ui.label("Curves").classes("panel-title").style("margin-top: 16px").props("role=heading aria-level=2")
        self.curves = CurvePanel(
            context,
            ask=self._ask,
            names=dict(view.runs),
            known=view.metric_keys,
            address=self.address,
            query=CurveQuery.of(context.query),
        )
        await self.curves.draw()
        self.region = await context.region(self.load, self._draw_view)
        context.live(self._follow, events=("runs.*",), objects=self._followed, gather_s=FOLLOW_S)

    def _followed(self) -> tuple[str, ...]:
        """Return the runs if one is running: points make no event."""
        return self.ids if self.view is not None and self.view.is_running else ()

    async def _follow(self) -> None:
        await self.region.refresh()
        await self.curves.refresh()

    def _chooser(self, offered: Sequence[ListedRun]) -> None:
        names: dict[str, str] = {
            each.id: f"{each.name} ({self.context.times.moment(each.started_at)})" for each in offered
        }
        names |= {ident: ident for ident in self.ids if ident not in names}
        chooser = ui.select(
            names,
            value=[*self.ids],
            multiple=True,
            label=f"Runs (at most {MOST_RUNS})",
            with_input=True,
        )
        chooser.props("dense outlined use-chips options-dense").classes("full")

        def choose() -> None:
            self.ids = tuple(chooser.value or ())[:MOST_RUNS]
            ui.navigate.to(self.address(CurveQuery.of(self.context.query)))

        chooser.on("popup-hide", lambda: choose() if tuple(chooser.value or ()) != self.ids else None)
        chooser.on("remove", choose)

    async def _ask(self, keys: tuple[str, ...], query: CurveQuery) -> Sequence[MetricCurve]:
        first, *others = self.ids
        low = INT64_MIN if query.from_step is None else query.from_step
        high = INT64_MAX if query.to_step is None else query.to_step
        points = max(100, min(1000, 20_000 // len(self.ids)))
        return await self.context.ask(
            lambda p: p.runs.curves(
                first, keys, others=tuple(others), points=points, from_step=low, to_step=high
            )
        )

    def _draw_view(self, view: ComparisonView) -> None:
        if len(view.axes) > 1:
            with ui.element("section").classes("panel").style("margin-top: 16px"):
                _heading("Parallel coordinates")
                draw_parallel(self.context, view.axes, view.coloured_by, what=f"{len(view.runs)} runs")
        with ui.element("section").classes("panel").style("margin-top: 16px"):
            with ui.element("div").classes("toolbar"):
                _heading("Parameters")
                ui.switch("Only those that differ", value=self.only_differences, on_change=self._filter)
            if view.params:
                self._table("Parameters", view, view.params)
            else:
                empty_state("No parameter differs.", icon="drag_handle")
        with ui.element("section").classes("panel").style("margin-top: 16px"):
            _heading("Metrics, last values (★ best)")
            self._table("Metrics", view, [*view.metrics, *view.facts])

    async def _filter(self) -> None:
        self.only_differences = not self.only_differences
        ui.navigate.history.replace(self.address(self.curves.query))
        await self.region.refresh()

    def _table(self, title: str, view: ComparisonView, rows: Sequence[ComparedRow]) -> None:
        columns = [TableColumn("name", "", "text")]
        columns += [TableColumn(f"r{at}", name, "mono") for at, (_, name) in enumerate(view.runs)]
        data_table(
            columns,
            [
                TableRow(
                    str(at),
                    {"name": row.name} | {f"r{place}": value for place, value in enumerate(row.values)},
                )
                for at, row in enumerate(rows)
            ],
            title=title,
        )


def _shown(run: str) -> Callable[[Platform], RunDetails]:
    return lambda platform: platform.runs.show(run)


def draw_parallel(context: PageContext, axes: Sequence[Axis], coloured_by: int | None, *, what: str) -> None:
    """Draw one line for each run or trial through all axes."""
    lines = [*zip(*(axis.values for axis in axes), strict=True)]
    with ui.element("div").style("overflow-x: auto"):
        options = parallel_coordinates(
            [Dimension(axis.name, axis.words, axis.log) for axis in axes],
            lines,
            palette(context.is_dark),
            title=f"Parallel coordinates of {what}: {', '.join(axis.name for axis in axes)}",
            coloured_by=coloured_by,
        )
        chart(options, height_px=340).style(f"min-width: {80 * len(axes)}px")


def _heading(words: str) -> None:
    ui.label(words).classes("panel-title").props("role=heading aria-level=2")


async def draw(context: PageContext) -> None:
    """Draw the page."""
    await ComparisonPage(context).draw()


PAGE = ConsolePage(
    "/w/{workspace}/compare",
    "Compare runs",
    draw,
    entry="runs",
    reads=("runs.show", "runs.list", "runs.curves"),
)
