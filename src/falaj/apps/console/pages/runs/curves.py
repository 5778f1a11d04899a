"""Curves of metrics: which metrics share a chart, and the panel that draws them and follows runs that are running."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from nicegui import ui

from falaj.apps.console.charts.element import chart, replace_chart
from falaj.apps.console.charts.lines import Curve, line_chart
from falaj.apps.console.charts.options import Options, Scale
from falaj.apps.console.charts.palette import Palette, palette
from falaj.apps.console.components.states import empty_state
from falaj.apps.console.page import PageContext
from falaj.records.tracking import INT64_MAX, INT64_MIN, MetricCurve

SYSTEM = "system/"
"""How the names of system metrics begin."""
PARTS = ("train", "training", "val", "valid", "validation", "test", "eval")
"""What a metric was measured on: metrics that differ in this alone share a chart."""
SYSTEM_UNITS = {"percentage": "%", "megabytes": "MB", "watts": "W"}
SHOWN_AT_FIRST = 8
POINTS = 1000
FOLLOW_S = 2.0
"""Curves are loaded again at most this often while points come in."""

XAxis = Literal["step", "time"]


@dataclass(frozen=True)
class CurveQuery:
    """What the address says about curves. No metrics: the first ones."""

    metrics: tuple[str, ...] = ()
    smoothing: float = 0.0
    scale: Scale = "linear"
    x_axis: XAxis = "step"
    from_step: int | None = None
    to_step: int | None = None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> CurveQuery:
        """Return the query in the part of an address behind the question mark; what is wrong in it is left out."""
        smoothing = _number(query.get("smoothing", ""))
        return cls(
            metrics=tuple(dict.fromkeys(part for part in query.get("metrics", "").split(",") if part)),
            smoothing=smoothing if smoothing is not None and 0 <= smoothing < 1 else 0.0,
            scale="log" if query.get("scale") == "log" else "linear",
            x_axis="time" if query.get("x") == "time" else "step",
            from_step=_step(query.get("from", "")),
            to_step=_step(query.get("to", "")),
        )

    def fields(self) -> dict[str, str]:
        """Return the same as parts of an address."""
        return {
            "metrics": ",".join(self.metrics),
            "smoothing": f"{self.smoothing:g}" if self.smoothing else "",
            "scale": "log" if self.scale == "log" else "",
            "x": "time" if self.x_axis == "time" else "",
            "from": "" if self.from_step is None else str(self.from_step),
            "to": "" if self.to_step is None else str(self.to_step),
        }


@dataclass(frozen=True)
class CurveChart:
    """Curves that share a chart, because they measure the same."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    total: int
    """Points that are stored; the chart has fewer if there are many, with all peaks."""


def metric_group(key: str) -> tuple[str, str]:
    """Return the chart that a metric belongs to, and its unit: train/loss and val_loss are `loss`."""
    if key.startswith(SYSTEM):
        unit = next((unit for word, unit in SYSTEM_UNITS.items() if key.endswith(word)), "")
        return (f"system [{unit}]" if unit else key), unit
    words = key.replace("_", "/").split("/")
    kept = [word for word in words if word.lower() not in PARTS]
    return ("_".join(kept) if kept and len(kept) < len(words) else key), ""


def curve_charts(
    curves: Sequence[MetricCurve], names: Mapping[str, str], query: CurveQuery
) -> tuple[CurveChart, ...]:
    """Return the charts of curves; `names` are those of runs by id, where several are compared."""
    groups: dict[tuple[str, str], list[tuple[Curve, int]]] = {}
    several = {
        group: len({each.key for each in curves if metric_group(each.key) == group}) > 1
        for group in {metric_group(each.key) for each in curves}
    }
    for each in curves:
        of_run = names.get(each.run, each.run)
        words = f"{of_run} · {each.key}" if several[metric_group(each.key)] else of_run
        words = each.key if len(names) < 2 else words
        xs = tuple(
            _milliseconds(point.timestamp) if query.x_axis == "time" else float(point.step)
            for point in each.points
        )
        is_compared = len(names) > 1 and not several[metric_group(each.key)]
        number = [*names].index(each.run) if is_compared and each.run in names else None
        curve = Curve(words, xs, tuple(point.value for point in each.points), number)
        groups.setdefault(metric_group(each.key), []).append((curve, each.total))
    return tuple(
        CurveChart(title, unit, tuple(curve for curve, _ in members), sum(total for _, total in members))
        for (title, unit), members in groups.items()
    )


def chart_options(found: CurveChart, query: CurveQuery, colours: Palette) -> Options:
    """Return the options of one chart."""
    is_time = query.x_axis == "time"
    return line_chart(
        found.curves,
        colours,
        title=f"{found.title}: {len(found.curves)} curves of {found.total:,} points",
        x_name="time" if is_time else "step",
        y_name=found.title.partition(" [")[0],
        y_unit=found.unit,
        scale=query.scale,
        smoothing=query.smoothing,
        x_time=is_time,
    )


def first_metrics(known: Sequence[str], query: CurveQuery) -> tuple[str, ...]:
    """Return the metrics that are shown: those of the address, else the first that are no system metrics."""
    asked = tuple(key for key in query.metrics if key in known)
    own = tuple(key for key in known if not key.startswith(SYSTEM))
    return asked or own[:SHOWN_AT_FIRST] or tuple(known[:SHOWN_AT_FIRST])


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _step(text: object) -> int | None:
    found = _number(str(text).strip()) if text not in (None, "") else None
    return int(found) if found is not None and INT64_MIN < found < INT64_MAX else None


def _milliseconds(at: datetime) -> float:
    return at.timestamp() * 1000


# ------------------------------------------------------------------------------------------- drawing


@dataclass(eq=False)
class CurvePanel:
    """The charts on an open page, and the controls of what they show; both stay while points come in."""

    context: PageContext
    ask: Callable[[tuple[str, ...], CurveQuery], Awaitable[Sequence[MetricCurve]]]
    """Asks for these metrics."""
    names: Mapping[str, str]
    """The names of runs by id, where several are compared."""
    known: tuple[str, ...]
    address: Callable[[CurveQuery], str]
    query: CurveQuery = CurveQuery()
    _charts: dict[str, ui.echart] = field(default_factory=dict)
    _shown: tuple[CurveChart, ...] | None = None
    _found: Sequence[MetricCurve] = ()

    async def draw(self) -> None:
        """Draw controls and charts."""
        self._controls()
        self._notice = ui.label().classes("muted small").props("data-part=points")
        self._box = ui.element("div").classes("columns")
        await self.refresh()

    async def learn(self, known: tuple[str, ...]) -> None:
        """Offer metrics that were logged since."""
        if known != self.known:
            self.known = known
            self._chosen.set_options([*known], value=[*first_metrics(known, self.query)])

    async def refresh(self) -> None:
        """Ask for the points again, and draw what is new."""
        wanted = first_metrics(self.known, self.query)
        self._found = await self.ask(wanted, self.query) if wanted else ()
        self._show()

    def _show(self) -> None:
        shown = curve_charts(self._found, self.names, self.query)
        colours = palette(self.context.is_dark)
        options = {each.title: chart_options(each, self.query, colours) for each in shown}
        if [*options] == [*self._charts] and shown:
            for title, each in options.items():
                replace_chart(self._charts[title], each)
        else:
            self._box.clear()
            self._charts.clear()
            with self._box:
                if not shown:
                    empty_state("No metric was logged yet.", command="run.log_metrics({…}, step=…)")
                for title, each in options.items():
                    with ui.element("section").classes("panel"):
                        ui.label(title).classes("panel-title wrap").props("role=heading aria-level=3")
                        self._charts[title] = chart(each, height_px=300)
        total, drawn = sum(c.total for c in shown), sum(len(k.xs) for c in shown for k in c.curves)
        self._notice.set_text(
            f"{total:,} points"
            + (f", drawn as {drawn:,} with all peaks; set steps to see more" if drawn < total else "")
        )

    def _controls(self) -> None:
        query = self.query
        with ui.element("div").classes("toolbar"):
            self._chosen = ui.select(
                [*self.known],
                value=[*first_metrics(self.known, query)],
                multiple=True,
                label="Metrics",
                on_change=lambda event: self._change(metrics=tuple(event.value or ())),
            )
            self._chosen.props("dense outlined options-dense").classes("chooser grow")
            with ui.column().classes("tight").style("min-width: 160px"):
                said = ui.label(f"Smoothing {query.smoothing:g}").classes("muted small")
                slider = ui.slider(min=0, max=0.99, step=0.01, value=query.smoothing)
                slider.props("dense aria-label=Smoothing").on_value_change(
                    lambda event: said.set_text(f"Smoothing {event.value:g}")
                )
                slider.on("change", lambda: self._change(smoothing=float(slider.value)))
            if any(key.startswith(SYSTEM) for key in self.known):
                ui.switch(
                    "System metrics",
                    value=any(key.startswith(SYSTEM) for key in query.metrics),
                    on_change=lambda event: self._chosen.set_value([*self._with_system(bool(event.value))]),
                )
            ui.switch(
                "Log scale",
                value=query.scale == "log",
                on_change=lambda event: self._change(scale="log" if event.value else "linear"),
            )
            ui.toggle(
                {"step": "Step", "time": "Time"},
                value=query.x_axis,
                on_change=lambda event: self._change(x_axis=event.value),
            ).props("dense no-caps aria-label='Horizontal axis'")
            for label, name, value in (
                ("From step", "from_step", query.from_step),
                ("To step", "to_step", query.to_step),
            ):
                box = ui.input(label, value="" if value is None else str(value)).props("dense outlined")
                box.style("width: 110px").on("keydown.enter", self._ranged(box, name))
                box.on("blur", self._ranged(box, name))

    def _with_system(self, wanted: bool) -> tuple[str, ...]:
        """Return the shown metrics with all system metrics, or without them."""
        own = [key for key in first_metrics(self.known, self.query) if not key.startswith(SYSTEM)]
        return (*own, *(key for key in self.known if wanted and key.startswith(SYSTEM)))

    def _ranged(self, box: ui.input, name: str) -> Callable[[], Awaitable[None]]:
        async def change() -> None:
            if (step := _step(box.value)) != getattr(self.query, name):
                await self._change(**{name: step})

        return change

    async def _change(self, **changes: object) -> None:
        before, self.query = self.query, replace(self.query, **changes)  # type: ignore[arg-type]
        ui.navigate.history.replace(self.address(self.query))
        asked = ("metrics", "from_step", "to_step")
        if any(getattr(before, name) != getattr(self.query, name) for name in asked):
            await self.refresh()
        else:
            self._show()
