"""Curves of many series: zoom, logarithmic scale, and smoothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from falaj.apps.console.charts.options import Options, Scale, axis, framed
from falaj.apps.console.charts.palette import Palette, series_style


@dataclass(frozen=True)
class Curve:
    """One series; a value that is not a number leaves a gap. `number` chooses its colour, by default its place."""

    name: str
    xs: tuple[float, ...]
    ys: tuple[float | None, ...]
    number: int | None = None


def line_chart(
    curves: Sequence[Curve],
    colours: Palette,
    *,
    title: str,
    x_name: str = "step",
    x_unit: str = "",
    y_name: str = "",
    y_unit: str = "",
    scale: Scale = "linear",
    smoothing: float = 0.0,
    x_time: bool = False,
) -> Options:
    """Return curves over a common axis. With `smoothing` the curves as they are stay visible, pale."""
    options = framed(colours, title=title, legend=[curve.name for curve in curves], zoom="x")
    options["tooltip"]["trigger"] = "axis"
    options["xAxis"] = axis("time" if x_time else "value", colours, name=x_name, unit=x_unit)
    options["yAxis"] = axis("log" if scale == "log" else "value", colours, name=y_name, unit=y_unit, at="y")
    options["series"] = []
    for place, curve in enumerate(curves):
        colour, style = series_style(place if curve.number is None else curve.number, colours)
        raw = _points(curve.xs, curve.ys, scale)
        line = {
            "type": "line",
            "name": curve.name,
            "showSymbol": len(raw) < 40,
            "symbolSize": 5,
            "connectNulls": False,
            "itemStyle": {"color": colour},
            "lineStyle": {"color": colour, "type": style, "width": 2},
        }
        if smoothing:
            pale = {"color": colour, "type": style, "width": 1, "opacity": 0.25}
            options["series"].append(
                line
                | {
                    "data": raw,
                    "lineStyle": pale,
                    "showSymbol": False,
                    "silent": True,
                    "tooltip": {"show": False},
                }
            )
            raw = _points(curve.xs, smoothed(curve.ys, smoothing), scale)
        options["series"].append(line | {"data": raw})
    return options


def smoothed(values: Sequence[float | None], weight: float) -> tuple[float | None, ...]:
    """Return an exponential moving average with the bias of its start removed; gaps stay gaps."""
    if not 0 <= weight < 1:
        raise ValueError("the weight of smoothing is at least 0 and below 1")
    found: list[float | None] = []
    mean, count = 0.0, 0
    for value in values:
        if value is None or not math.isfinite(value):
            found.append(None)
            continue
        count += 1
        mean = weight * mean + (1 - weight) * value
        found.append(mean / (1 - weight**count))
    return tuple(found)


def _points(xs: Sequence[float], ys: Sequence[float | None], scale: Scale) -> list[list[float | None]]:
    return [
        [x, None if y is None or not math.isfinite(y) or (scale == "log" and y <= 0) else y]
        for x, y in zip(xs, ys, strict=True)
    ]
