"""Graphs in layers, and scatter plots with their Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from falaj.apps.console.charts.options import Options, Scale, axis, framed
from falaj.apps.console.charts.palette import Palette, series_style

ACROSS, DOWN = 190, 72
"""Distance of layers and of nodes in a layer, in pixels."""
SYMBOLS = ("roundRect", "circle", "diamond")
"""Of groups: the next one where the colours begin again."""


@dataclass(frozen=True)
class GraphNode:
    """A node; `group` chooses its colour and is named in the legend, `target` is where a click leads."""

    key: str
    name: str
    group: str
    target: str = ""


def graph(
    nodes: Sequence[GraphNode], edges: Sequence[tuple[str, str]], colours: Palette, *, title: str
) -> Options:
    """Return a directed graph whose layers go from left to right, sources first."""
    groups = [*dict.fromkeys(node.group for node in nodes)]
    places = layered([node.key for node in nodes], edges)
    options = framed(colours, title=title, legend=groups)
    del options["grid"]
    options["series"] = [
        {
            "type": "graph",
            "layout": "none",
            "left": 64,
            "right": 64,
            "roam": True,
            "symbolSize": [18, 18],
            "edgeSymbol": ["none", "arrow"],
            "edgeSymbolSize": 7,
            "categories": [
                {
                    "name": group,
                    "symbol": SYMBOLS[number // len(colours.series) % len(SYMBOLS)],
                    "itemStyle": {"color": series_style(number, colours)[0]},
                }
                for number, group in enumerate(groups)
            ],
            "label": {
                "show": True,
                "color": colours.ink,
                "width": 104,
                "overflow": "truncate",
            },
            "lineStyle": {"color": colours.muted, "curveness": 0.08},
            "data": [
                {
                    "id": node.key,
                    "name": node.name,
                    "category": groups.index(node.group),
                    "x": places[node.key][0] * ACROSS,
                    "y": places[node.key][1] * DOWN,
                    "target": node.target,
                    "label": {"position": "bottom" if places[node.key][0] % 2 else "top"},
                }
                for node in nodes
            ],
            "links": [{"source": source, "target": target} for source, target in edges],
        }
    ]
    return options


def layered(keys: Sequence[str], edges: Sequence[tuple[str, str]]) -> Mapping[str, tuple[int, float]]:
    """Return the layer of each node, one behind its last source, and its place there; a circle is cut somewhere."""
    sources: dict[str, list[str]] = {key: [] for key in keys}
    for source, target in edges:
        if source in sources and target in sources and source != target:
            sources[target].append(source)
    depth: dict[str, int] = {}
    waiting = [*keys]
    while waiting:
        ready = [key for key in waiting if all(each in depth for each in sources[key])] or waiting[:1]
        for key in ready:
            depth[key] = max((depth[each] + 1 for each in sources[key] if each in depth), default=0)
        waiting = [key for key in waiting if key not in depth]
    layers: dict[int, list[str]] = {}
    for key in keys:
        layers.setdefault(depth[key], []).append(key)
    return {
        key: (layer, number - (len(members) - 1) / 2)
        for layer, members in layers.items()
        for number, key in enumerate(members)
    }


@dataclass(frozen=True)
class ParetoPoint:
    """A point: lower `x` is better, and higher `y` unless the plot says otherwise; a refused one is on no front."""

    name: str
    x: float
    y: float
    is_refused: bool = False


def pareto(
    candidates: Sequence[ParetoPoint],
    colours: Palette,
    *,
    title: str,
    x_name: str,
    x_unit: str,
    y_name: str,
    y_unit: str = "",
    y_better: int = 1,
    scale: Scale = "linear",
) -> Options:
    """Return points, and the line of those that no other point is better than in both; `y_better` is 1 or -1."""
    best = front([each for each in candidates if not each.is_refused], y_better=y_better)
    options = framed(colours, title=title, legend=["candidate", "Pareto front"], zoom="none")
    options["xAxis"] = axis("log" if scale == "log" else "value", colours, name=x_name, unit=x_unit)
    options["yAxis"] = axis("value", colours, name=y_name, unit=y_unit, at="y")
    options["yAxis"]["boundaryGap"] = ["5%", "15%"]  # names stand above their points
    label = {"show": True, "position": "top", "formatter": "{b}", "color": colours.ink, "fontSize": 11}
    options["series"] = [
        {
            "type": "scatter",
            "name": "candidate",
            "symbolSize": 11,
            "itemStyle": {"color": colours.series[0]},
            "label": label,
            "labelLayout": {"hideOverlap": True},
            "data": [{"name": each.name, "value": [each.x, each.y]} for each in candidates],
        },
        {
            "type": "line",
            "name": "Pareto front",
            "step": "end",
            "symbol": "diamond",
            "symbolSize": 13,
            "itemStyle": {"color": colours.series[1]},
            "lineStyle": {"color": colours.series[1], "type": "dashed"},
            "data": [{"name": each.name, "value": [each.x, each.y]} for each in best],
        },
    ]
    return options


def front(candidates: Sequence[ParetoPoint], *, y_better: int = 1) -> list[ParetoPoint]:
    """Return the candidates that no other one is better than in both, by `x`."""
    found: list[ParetoPoint] = []
    for each in sorted(candidates, key=lambda c: (c.x, -y_better * c.y)):
        if not found or y_better * each.y > y_better * found[-1].y:
            found.append(each)
    return found
