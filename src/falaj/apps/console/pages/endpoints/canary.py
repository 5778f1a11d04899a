"""The canary of an endpoint: its evidence with a confidence sequence, and the verdict on the last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.charts.element import chart
from falaj.apps.console.charts.lines import Curve, line_chart
from falaj.apps.console.charts.palette import palette
from falaj.apps.console.components.states import BAD, GOOD, IDLE, WAITING, state_badge
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import PageContext
from falaj.apps.console.times import Times, number
from falaj.records.control.pipelines import (
    CanaryOutcome,
    CanaryProgress,
    CanaryVerdict,
    EvidencePoint,
    MetricEvidence,
)

NAMES = {"error_rate": "error rate", "latency": "share of slow requests", "score": "score"}
UNITS = {"error_rate": "%", "latency": "%", "score": ""}
OUTCOMES = {
    CanaryOutcome.PROMOTE: ("shown to be within the margins", GOOD),
    CanaryOutcome.ROLL_BACK: ("shown to be worse", BAD),
    CanaryOutcome.UNDECIDED: ("undecided so far", WAITING),
}
ENDED = {
    CanaryOutcome.PROMOTE: ("promoted", GOOD),
    CanaryOutcome.ROLL_BACK: ("rolled back", BAD),
    CanaryOutcome.UNDECIDED: ("undecided", IDLE),
}
MUCH_EVIDENCE = 1_000_000
"""E-values grow without end; beyond this their digits tell nothing more."""
COLUMNS = (
    TableColumn("metric", "Metric"),
    TableColumn("compared", "Compared", "number"),
    TableColumn("champion", "Champion", "number"),
    TableColumn("challenger", "Challenger", "number"),
    TableColumn("margin", "Margin", "number"),
    TableColumn("worse", "Evidence that it is worse", "number"),
    TableColumn("within", "Evidence that it is within the margin", "number"),
    TableColumn("more", "More needed", "number"),
)


@dataclass(frozen=True)
class EvidenceLine:
    """What was seen of one metric."""

    metric: str
    compared: str
    champion: str
    challenger: str
    margin: str
    worse: str
    within: str
    more: str


@dataclass(frozen=True)
class EvidencePlot:
    """One metric over the challenger's compared values: the difference with its confidence sequence, and e-values."""

    metric: str
    unit: str
    counts: tuple[float, ...]
    difference: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    margin: tuple[float | None, ...]
    worse: tuple[float, ...]
    within: tuple[float, ...]
    worse_needed: float
    within_needed: float


@dataclass(frozen=True)
class CanaryView:
    """What the page shows of a canary."""

    title: str
    state: str
    tone: str
    words: str
    risk: str
    lines: tuple[EvidenceLine, ...]
    plots: tuple[EvidencePlot, ...]
    work: str
    ended: tuple[str, str, str] | None
    """State, tone and words of the last verdict."""
    ended_lines: tuple[EvidenceLine, ...]


def canary_view(found: CanaryProgress | None, *, times: Times) -> CanaryView | None:
    """Return what is shown of a canary; none if there is none and was none."""
    if found is None:
        return None
    ended = _ended(found.ended)
    lines = tuple(_line(each) for each in found.ended.evidence) if found.ended else ()
    if found.outcome is None or found.plan is None:
        return CanaryView("No canary is under way", "", "", "", "", (), (), "", ended, lines)
    state, tone = OUTCOMES[found.outcome]
    what = "Canary" if found.work else "Comparison (no canary is under way)"
    return CanaryView(
        title=f"{what}: version {found.challenger} beside version {found.champion}, "
        f"since {times.moment(found.since)}",
        state=state,
        tone=tone,
        words=found.words,
        risk=f"The difference is within its band at all times at once but for a risk of "
        f"{found.plan.false_promotion:.0%} (approximately). The evidence decides: the canary is rolled back or "
        "promoted when a curve crosses its dashed line.",
        lines=tuple(_line(each) for each in found.evidence),
        plots=_plots(found),
        work=found.work or "",
        ended=ended,
        ended_lines=lines,
    )


def _ended(verdict: CanaryVerdict | None) -> tuple[str, str, str] | None:
    return None if verdict is None else (*ENDED[verdict.outcome], verdict.words)


def _line(found: MetricEvidence) -> EvidenceLine:
    scale = 100 if UNITS[found.metric] else 1
    unit = f" {UNITS[found.metric]}" if UNITS[found.metric] else ""

    def shown(value: float | None) -> str:
        return "–" if value is None else f"{number(scale * value)}{unit}"

    return EvidenceLine(
        metric=NAMES[found.metric],
        compared=f"{found.compared:,}",
        champion=shown(found.champion),
        challenger=shown(found.challenger),
        margin=shown(found.margin),
        worse=_evidence(found.worse, found.worse_needed),
        within=_evidence(found.within, found.within_needed),
        more="–" if found.more is None else f"about {found.more:,}",
    )


def _evidence(value: float, needed: float) -> str:
    shown = number(value) if value < MUCH_EVIDENCE else f"over {MUCH_EVIDENCE:,}"
    return f"{shown} of {number(needed)}"


def _plots(found: CanaryProgress) -> tuple[EvidencePlot, ...]:
    series: dict[str, list[EvidencePoint]] = {}
    for point in found.points:
        for each in point.metrics:
            if each.compared:
                series.setdefault(each.metric, []).append(each)
    return tuple(_plot(metric, points) for metric, points in series.items())


def _plot(metric: str, points: Sequence[EvidencePoint]) -> EvidencePlot:
    scale = 100 if UNITS[metric] else 1

    def scaled(values: Sequence[float | None]) -> tuple[float | None, ...]:
        return tuple(None if value is None else scale * value for value in values)

    differences = [
        None if each.challenger is None or each.champion is None else each.challenger - each.champion
        for each in points
    ]
    return EvidencePlot(
        metric=NAMES[metric],
        unit=UNITS[metric],
        counts=tuple(float(each.compared) for each in points),
        difference=scaled(differences),
        low=scaled([each.low for each in points]),
        high=scaled([each.high for each in points]),
        margin=scaled([each.margin for each in points]),
        worse=tuple(each.worse for each in points),
        within=tuple(each.within for each in points),
        worse_needed=points[-1].worse_needed,
        within_needed=points[-1].within_needed,
    )


# ------------------------------------------------------------------------------------------- drawing


def draw_canary(context: PageContext, view: CanaryView) -> None:
    """Draw a canary."""
    ui.label(view.title).classes("strong wrap")
    if view.state:
        state_badge(view.state, tone=view.tone)
        ui.label(view.words).classes("muted wrap")
        _draw_lines(view.lines, title="Evidence so far")
        with ui.element("div").classes("columns"):
            for plot in view.plots:
                _draw_plot(context, plot)
        ui.label(view.risk).classes("muted small wrap")
    if view.ended is not None:
        state, tone, words = view.ended
        ui.label("Last verdict").classes("strong").style("margin-top: 12px")
        state_badge(state, tone=tone)
        ui.label(words).classes("wrap").props("data-part=verdict")
        if view.ended_lines:
            _draw_lines(view.ended_lines, title="Evidence of the last verdict")


def _draw_lines(lines: Sequence[EvidenceLine], *, title: str) -> None:
    rows = [
        TableRow(each.metric, {column.key: getattr(each, column.key) for column in COLUMNS}) for each in lines
    ]
    data_table(COLUMNS, rows, title=title)


def _draw_plot(context: PageContext, plot: EvidencePlot) -> None:
    colours, counts = palette(context.is_dark), plot.counts
    with ui.element("section").style("min-width: 0"):
        ui.label(f"Difference in {plot.metric}").classes("small strong")
        options = line_chart(
            [
                Curve("challenger − champion", counts, plot.difference),
                Curve("lower bound", counts, plot.low),
                Curve("upper bound", counts, plot.high),
                Curve("margin", counts, plot.margin),
            ],
            colours,
            title=f"Difference in {plot.metric} with its confidence sequence and the margin",
            x_name="compared values",
            y_name="difference",
            y_unit=plot.unit,
        )
        for series, style, width in zip(
            options["series"], ("solid", "dotted", "dotted", "dashed"), (2, 1, 1, 2), strict=True
        ):
            series["lineStyle"] |= {"type": style, "width": width}
        chart(options, height_px=260)
    with ui.element("section").style("min-width: 0"):
        ui.label(f"Evidence on {plot.metric}").classes("small strong")
        flat = (plot.worse_needed,) * len(counts), (plot.within_needed,) * len(counts)
        options = line_chart(
            [
                Curve("it is worse", counts, plot.worse),
                Curve("needed to roll back", counts, flat[0]),
                Curve("it is within the margin", counts, plot.within),
                Curve("needed to promote", counts, flat[1]),
            ],
            colours,
            title=f"Evidence (e-values) on {plot.metric}, with what is needed to decide",
            x_name="compared values",
            y_name="e-value",
            scale="log",
        )
        for at, series in enumerate(options["series"]):
            series["lineStyle"] |= {"type": "dashed" if at % 2 else "solid"}
            series["showSymbol"] = False
        chart(options, height_px=260)
