"""Bars: amounts against limits, two histograms side by side, and the shares of one whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from falaj.apps.console.charts.options import Options, axis, framed
from falaj.apps.console.charts.palette import Palette, series_style


@dataclass(frozen=True)
class Bar:
    """An amount in parts, by the names of the parts; `limit` is drawn as a mark across it."""

    name: str
    parts: tuple[float, ...]
    limit: float | None = None


def bar_chart(
    bars: Sequence[Bar],
    parts: Sequence[str],
    colours: Palette,
    *,
    title: str,
    unit: str,
    limit_name: str = "limit",
) -> Options:
    """Return horizontal stacked bars, the first on top, with their limits."""
    has_limits = any(bar.limit is not None for bar in bars)
    options = framed(
        colours, title=title, legend=[*parts, *([limit_name] if has_limits else [])], named_y=False
    )
    names = [bar.name for bar in bars]
    options["xAxis"] = axis("value", colours, unit=unit, name="amount") | {"scale": False}
    options["yAxis"] = axis("category", colours, labels=names, at="y") | {"inverse": True}
    options["series"] = [
        {
            "type": "bar",
            "name": part,
            "stack": "whole",
            "barMaxWidth": 22,
            "itemStyle": {"color": series_style(number, colours)[0]},
            "data": [bar.parts[number] for bar in bars],
        }
        for number, part in enumerate(parts)
    ]
    if has_limits:
        options["series"].append(
            {
                "type": "scatter",
                "name": limit_name,
                "symbol": "rect",
                "symbolSize": [3, 26],
                "itemStyle": {"color": colours.ink},
                "data": [[bar.limit, number] for number, bar in enumerate(bars) if bar.limit is not None],
                "z": 5,
            }
        )
    return options


def histogram_pair(
    edges: Sequence[float],
    before: Sequence[float],
    after: Sequence[float],
    colours: Palette,
    *,
    title: str,
    unit: str = "",
    names: tuple[str, str] = ("before", "after"),
) -> Options:
    """Return two histograms over the same bins, as shares of their rows in percent."""
    labels = [f"{low:.4g} – {high:.4g}" for low, high in pairwise(edges)]
    options = framed(colours, title=title, legend=names)
    options["tooltip"]["trigger"] = "axis"
    options["xAxis"] = axis("category", colours, name="value", unit=unit, labels=labels)
    options["yAxis"] = axis("value", colours, name="share of rows", unit="%", at="y") | {"scale": False}
    options["series"] = [
        {
            "type": "bar",
            "name": name,
            "barGap": "0%",
            "itemStyle": {"color": series_style(number, colours)[0]},
            "data": _percent(counts),
        }
        for number, (name, counts) in enumerate(zip(names, (before, after), strict=True))
    ]
    return options


def _percent(counts: Sequence[float]) -> list[float]:
    whole = sum(counts)
    return [round(100 * each / whole, 3) if whole else 0.0 for each in counts]
