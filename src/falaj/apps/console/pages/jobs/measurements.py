"""What the run of a job says about its training: hardware use, the plan search, and where the time of a step goes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.charts.bars import Bar, bar_chart
from falaj.apps.console.charts.element import chart
from falaj.apps.console.charts.lines import Curve, line_chart
from falaj.apps.console.charts.palette import palette
from falaj.apps.console.components.states import fact
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import PageContext
from falaj.apps.console.times import duration, number
from falaj.records.scheduling.accounting import UsageRow
from falaj.records.tracking import MetricCurve, RunDetails

PLAN_HEADINGS = ("plan", "samples/s", "× plain", "loss", "gradient", "s")
PLAN_COLUMNS = (
    TableColumn("plan", "Plan"),
    TableColumn("rate", "Samples/s", "number"),
    TableColumn("ratio", "× plain", "number"),
    TableColumn("loss", "Error of the loss", "number"),
    TableColumn("gradient", "Error of the gradient", "number"),
    TableColumn("seconds", "Tried for [s]", "number"),
    TableColumn("verdict", "Verdict"),
)
STEP_PARTS = {
    "input": "waiting for data",
    "copy": "copies to the device",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "compute": "computing",
    "communication": "communication",
    "launch": "launching",
    "python": "between steps",
}
SHOWN_SHARE = 0.005
SYSTEM = "system/"
GROUPS = (
    ("Utilization", "%", r"percentage$"),
    ("Memory", "MB", r"memory_usage_megabytes$"),
    ("Power", "W", r"watts$"),
    ("Traffic", "MB", r"megabytes$"),
)
RATES = {"samples_per_second": ("Throughput", "samples/s"), "mfu": ("Model FLOPs utilization", "share of 1")}
CURVES = 24
"""So many metrics of the machine are drawn at most."""


@dataclass(frozen=True)
class UsePlot:
    """Curves of one unit over time; times in milliseconds since 1970."""

    name: str
    unit: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class StepTime:
    """The verdict of a profile, and the shares of the time of a step in percent."""

    sentence: str
    step: str
    shares: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class MeasurementsView:
    facts: tuple[tuple[str, str], ...] = ()
    plots: tuple[UsePlot, ...] = ()
    plan: str = ""
    tried: tuple[TableRow, ...] = ()
    profile: StepTime | None = None


def wanted_curves(run: RunDetails) -> list[str]:
    """Return the metrics of a run that tell about the hardware."""
    keys = [each.key for each in run.metrics]
    return [key for key in keys if key in RATES or key.startswith(SYSTEM)][:CURVES]


def measurements_view(
    run: RunDetails | None, curves: Sequence[MetricCurve], used: UsageRow | None
) -> MeasurementsView:
    """Return what is shown of the hardware, the plan and the profile of a job."""
    params = {each.key: each.value for each in run.params} if run else {}
    metrics = {each.key: each.last for each in run.metrics} if run else {}
    return MeasurementsView(
        facts=(*_usage(used), *_rates(metrics), *_hardware(params)),
        plots=_plots(curves),
        plan=params.get("plan", ""),
        tried=plan_rows(params.get("plan.tried", "")),
        profile=_profile(params, metrics),
    )


def _usage(used: UsageRow | None) -> list[tuple[str, str]]:
    if used is None:
        return []
    found = [("GPU-hours held", number(used.gpu_hours)), ("CPU-hours held", number(used.cpu_hours))]
    energy = "not measured" if used.energy_kwh is None else f"{number(used.energy_kwh)} kWh"
    costs = [("Cost", f"{number(amount)} {currency}") for currency, amount in used.costs.items()]
    return [*found, ("Energy", energy), *costs]


def _rates(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if "samples_per_second" in metrics:
        found.append(("Throughput", f"{number(metrics['samples_per_second'])} samples/s"))
    if "mfu" in metrics:
        found.append(("Model FLOPs utilization", f"{metrics['mfu']:.1%}"))
    if "goodput" in metrics:
        found.append(("Goodput", f"{metrics['goodput']:.1%} of the time is training"))
    return found


def _hardware(params: Mapping[str, str]) -> list[tuple[str, str]]:
    names = {
        "hardware.gpu": "GPU",
        "hardware.gpus": "GPUs seen",
        "hardware.cpu": "CPU",
        "hardware.cores": "Cores",
        "processes": "Processes",
        "layout": "Layout",
    }
    return [(label, params[key]) for key, label in names.items() if key in params]


def _plots(curves: Sequence[MetricCurve]) -> tuple[UsePlot, ...]:
    groups: dict[tuple[str, str], list[Curve]] = {}
    for each in curves:
        if not each.points:
            continue
        found = RATES.get(each.key) or next(
            ((name, unit) for name, unit, pattern in GROUPS if re.search(pattern, each.key)), ("Other", "")
        )
        name = each.key.removeprefix(SYSTEM).replace("_", " ")
        xs = tuple(1000 * point.timestamp.timestamp() for point in each.points)
        groups.setdefault(found, []).append(Curve(name, xs, tuple(point.value for point in each.points)))
    return tuple(UsePlot(name, unit, tuple(found)) for (name, unit), found in groups.items())


def plan_rows(text: str) -> tuple[TableRow, ...]:
    """Return the rows of the table that the runtime logs as the parameter `plan.tried`; other text is left out."""
    rows: list[TableRow] = []
    starts: list[int] = []
    for line in text.splitlines():
        if line.startswith("plan ") and "samples/s" in line:
            starts = _starts(line)
        elif starts and line.strip() and not line.endswith(":"):
            ends = [*starts[1:], len(line)]
            cells = [line[begin:end].strip() for begin, end in zip(starts, ends, strict=True)]
            seconds, _, verdict = cells[5].partition("  ")
            values = dict(
                zip([each.key for each in PLAN_COLUMNS], [*cells[:5], seconds, verdict.strip()], strict=True)
            )
            rows.append(TableRow(str(len(rows)), values))
    return tuple(rows)


def _starts(line: str) -> list[int]:
    found, at = list[int](), 0
    for heading in PLAN_HEADINGS:
        at = line.find(heading, at)
        if at < 0:
            return []
        found.append(at)
        at += len(heading)
    return found


def _profile(params: Mapping[str, str], metrics: Mapping[str, float]) -> StepTime | None:
    shares = {name: metrics[key] for name in STEP_PARTS if (key := f"profile/{name}") in metrics}
    if not shares:
        return None
    shown = tuple(
        (STEP_PARTS[name], round(100 * share, 1)) for name, share in shares.items() if share >= SHOWN_SHARE
    )
    step = duration(metrics["step_time"]) if "step_time" in metrics else ""
    return StepTime(params.get("profile", ""), step, shown)


# ------------------------------------------------------------------------------------------- drawing


def draw_measurements(context: PageContext, view: MeasurementsView) -> None:
    """Draw hardware use, the plan search and the profile."""
    colours = palette(context.is_dark)
    with _panel("Hardware use"):
        if not view.facts and not view.plots:
            ui.label("Nothing was measured yet.").classes("muted")
        with ui.element("dl").classes("facts"):
            for name, value in view.facts:
                fact(name, value)
        with ui.element("div").classes("columns"):
            for plot in view.plots:
                options = line_chart(
                    plot.curves,
                    colours,
                    title=f"{plot.name} over time",
                    x_name="time",
                    y_name=plot.name.lower(),
                    y_unit=plot.unit,
                    x_time=True,
                )
                chart(options, height_px=260)
    if view.profile is not None:
        with _panel("Where the time of a step goes"):
            if view.profile.sentence:
                ui.label(view.profile.sentence).classes("strong wrap")
            parts = [name for name, _ in view.profile.shares]
            bar = Bar(view.profile.step or "step", tuple(share for _, share in view.profile.shares))
            title = "Shares of the time of a training step"
            chart(bar_chart([bar], parts, colours, title=title, unit="% of a step"), height_px=170)
    if view.plan:
        with _panel("Plan"):
            ui.label(view.plan).classes("strong wrap")
            if view.tried:
                data_table(PLAN_COLUMNS, view.tried, title="Plans that were tried")


def _panel(title: str) -> ui.element:
    panel = ui.element("section").classes("panel spaced")
    with panel:
        ui.label(title).classes("panel-title").props("role=heading aria-level=2")
    return panel
