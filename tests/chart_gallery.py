"""A page with every chart of the console, for the browser tests: `python chart_gallery.py PORT`."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from nicegui import ui

from falaj.apps.console.charts.bars import Bar, bar_chart, histogram_pair
from falaj.apps.console.charts.element import chart
from falaj.apps.console.charts.graphs import GraphNode, ParetoPoint, graph, pareto
from falaj.apps.console.charts.grids import Dimension, GanttBar, gantt, heat_map, parallel_coordinates
from falaj.apps.console.charts.lines import Curve, line_chart
from falaj.apps.console.charts.options import Options
from falaj.apps.console.charts.palette import Palette, palette

HOSTILE = "<img src=x onerror=\"document.title='pwned'\">"
HOUR_MS = 3_600_000
CSS = Path(__file__).parent.parent / "src/falaj/apps/console/assets/console.css"


def curves() -> list[Curve]:
    steps = tuple(float(step) for step in range(300))
    loss = tuple(3 * math.exp(-step / 60) + 0.2 * math.sin(step) ** 2 + 0.05 for step in steps)
    return [
        Curve("train loss", steps, loss),
        Curve("validation loss", steps, tuple(each + 0.1 for each in loss)),
        Curve(HOSTILE, steps, tuple(None if 100 < step < 150 else 1.0 for step in steps)),
    ]


def charts(colours: Palette) -> list[tuple[str, Options]]:
    """Return each chart with the name of what it shows."""
    jobs = [
        GanttBar("node-1 gpu 0", "train-a", 0, 3 * HOUR_MS, "risk"),
        GanttBar("node-1 gpu 0", "train-b", 2 * HOUR_MS, 5 * HOUR_MS, "search"),
        GanttBar("node-1 gpu 1", HOSTILE, HOUR_MS, 4 * HOUR_MS, "risk"),
        GanttBar("node-2 gpu 0", "tune", 4.5 * HOUR_MS, 6 * HOUR_MS, "default"),
    ]
    bars = [Bar("risk", (3, 1), 4), Bar("search", (2, 2), 2), Bar("default", (0.5, 0), 8)]
    heat = [[abs(math.sin(row + column / 3)) / 2 for column in range(24)] for row in range(6)]
    nodes = [
        GraphNode("s", "trips.parquet", "source"),
        GraphNode("v", "driver_trips", "feature view"),
        GraphNode("t", "churn-2026", "training set"),
        GraphNode("m", HOSTILE, "model", "/w/default/models"),
        GraphNode("e", "churn", "endpoint"),
    ]
    variants = [
        ParetoPoint("fp32", 12.0, 0.91),
        ParetoPoint("fp16", 7.0, 0.909),
        ParetoPoint("int8", 4.0, 0.9),
        ParetoPoint("pruned", 8.0, 0.88),
    ]
    lines = [
        [10 ** -(1 + at / 10), ("adam", "sgd")[at % 2], 32 * (1 + at % 4), 0.7 + at / 100] for at in range(20)
    ]
    dims = [
        Dimension("lr", log=True),
        Dimension("optimizer", ("adam", "sgd")),
        Dimension("batch"),
        Dimension("auc"),
    ]
    return [
        ("lines", line_chart(curves(), colours, title="Loss by step", y_name="loss", y_unit="nats")),
        (
            "smooth",
            line_chart(
                curves()[:2],
                colours,
                title="Loss, smoothed",
                y_name="loss",
                y_unit="nats",
                scale="log",
                smoothing=0.9,
            ),
        ),
        ("bars", bar_chart(bars, ("within quota", "borrowed"), colours, title="GPUs by queue", unit="GPUs")),
        (
            "pair",
            histogram_pair((0, 1, 2, 3, 4), (5, 9, 4, 1), (2, 5, 8, 6), colours, title="fare", unit="AED"),
        ),
        (
            "heat",
            heat_map(
                [f"feature {at}" for at in range(6)],
                [f"{at:02d}:00" for at in range(24)],
                heat,
                colours,
                title="Drift by feature and hour",
                unit="PSI",
            ),
        ),
        ("gantt", gantt(jobs, colours, title="Jobs of the last hours by GPU", now_ms=6 * HOUR_MS)),
        (
            "graph",
            graph(nodes, [("s", "v"), ("v", "t"), ("t", "m"), ("m", "e")], colours, title="Lineage of churn"),
        ),
        (
            "pareto",
            pareto(variants, colours, title="Variants", x_name="latency", x_unit="ms", y_name="AUC"),
        ),
        ("parallel", parallel_coordinates(dims, lines, colours, title="Trials of a study", coloured_by=3)),
    ]


@ui.page("/{theme}")
def gallery(theme: str) -> None:
    ui.dark_mode(theme == "dark")
    ui.add_css(CSS.read_text())
    with ui.element("main").classes("page"), ui.element("div").classes("columns"):
        for name, options in charts(palette(theme == "dark")):
            with ui.element("section").classes("panel").props(f"id={name}"):
                ui.label(name).classes("panel-title")
                chart(options, height_px=300)


if __name__ in {"__main__", "__mp_main__"}:
    ui.run(host="127.0.0.1", port=int(sys.argv[1]), show=False, reload=False, tailwind=False)
