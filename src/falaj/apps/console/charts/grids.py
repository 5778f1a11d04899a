"""Heat maps, Gantt charts and parallel coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from falaj.apps.console.charts.options import Options, axis, framed
from falaj.apps.console.charts.palette import Palette, series_style


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    colours: Palette,
    *,
    title: str,
    unit: str,
    most: float | None = None,
) -> Options:
    """Return a heat map; `values` has a row for each of `rows`, and none where nothing is known."""
    cells = [
        [x, y, value] for y, row in enumerate(values) for x, value in enumerate(row) if value is not None
    ]
    options = framed(colours, title=title, named_y=False)
    options["xAxis"] = axis("category", colours, labels=columns)
    options["yAxis"] = axis("category", colours, labels=rows, at="y") | {"inverse": True}
    options["yAxis"]["axisLabel"]["width"] = 190
    options["grid"] |= {"bottom": 72}
    options["visualMap"] = {
        "min": 0,
        "max": most if most is not None else max((cell[2] or 0.0 for cell in cells), default=1.0) or 1.0,
        "calculable": True,
        "precision": 3,
        "orient": "horizontal",
        "left": "center",
        "bottom": 0,
        "text": [unit, ""],
        "textStyle": {"color": colours.ink},
        "inRange": {"color": [*colours.ramp]},
    }
    options["series"] = [
        {
            "type": "heatmap",
            "name": unit,
            "data": cells,
            "itemStyle": {"borderColor": colours.paper, "borderWidth": 1},
        }
    ]
    return options


@dataclass(frozen=True)
class GanttBar:
    """Something that lasted on one lane; times in milliseconds since 1970, as browsers count."""

    lane: str
    name: str
    begin_ms: float
    end_ms: float
    group: str


def gantt(spans: Sequence[GanttBar], colours: Palette, *, title: str, now_ms: float) -> Options:
    """Return spans on lanes over time, coloured by their group; each is a stacked bar behind an invisible one.

    A lane with spans at the same time is drawn as several rows, so that none hides another.
    """
    rows = _rows(spans)
    groups = [*dict.fromkeys(span.group for span in spans)]
    options = framed(colours, title=title, legend=groups, zoom="x", named_y=False)
    options["xAxis"] = axis("time", colours, name="time") | {"max": now_ms}
    options["yAxis"] = axis("category", colours, labels=[lane for lane, _ in rows], at="y") | {
        "inverse": True
    }
    options["series"] = []
    for number, group in enumerate(groups):
        colour = series_style(number, colours)[0]
        shown = [(y, span) for y, (_, row) in enumerate(rows) for span in row if span.group == group]
        options["series"].append(
            {
                "type": "line",
                "name": group,
                "symbol": "none",
                "itemStyle": {"color": colour},
                "lineStyle": {"color": colour, "width": 14, "cap": "butt"},
                "data": [point for y, span in shown for point in _segment(span, y)],
            }
        )
    return options


def _segment(span: GanttBar, y: int) -> list[Options]:
    """Return the ends of a span, and a gap behind it."""
    return [
        {"value": [span.begin_ms, y], "name": span.name},
        {"value": [span.end_ms, y], "name": span.name},
        {"value": [span.end_ms, None]},
    ]


def _rows(spans: Sequence[GanttBar]) -> list[tuple[str, list[GanttBar]]]:
    rows: list[tuple[str, list[GanttBar]]] = []
    for lane in dict.fromkeys(span.lane for span in spans):
        mine: list[list[GanttBar]] = []
        for span in sorted((each for each in spans if each.lane == lane), key=lambda each: each.begin_ms):
            row = next((each for each in mine if each[-1].end_ms <= span.begin_ms), None)
            if row is None:
                mine.append(row := [])
            row.append(span)
        rows += [(lane if number == 0 else f"{lane} ({number + 1})", row) for number, row in enumerate(mine)]
    return rows


@dataclass(frozen=True)
class Dimension:
    """One axis of parallel coordinates: numbers, or words in their order."""

    name: str
    words: tuple[str, ...] | None = None
    log: bool = False


def parallel_coordinates(
    dimensions: Sequence[Dimension],
    lines: Sequence[Sequence[float | str | None]],
    colours: Palette,
    *,
    title: str,
    coloured_by: int | None = None,
) -> Options:
    """Return one line a run through all dimensions, coloured by one of them."""
    options = framed(colours, title=title)
    del options["grid"]
    options["parallel"] = {"left": 48, "right": 72, "top": 48, "bottom": 32 if coloured_by is None else 80}
    options["parallelAxis"] = [
        {
            "dim": number,
            "name": each.name,
            "type": "category" if each.words is not None else "log" if each.log else "value",
            **({"data": [*each.words]} if each.words is not None else {"scale": True}),
            "nameTextStyle": {"color": colours.ink, "width": 120, "overflow": "truncate"},
            "axisLabel": {"color": colours.muted, "width": 84, "overflow": "truncate"},
            "axisLine": {"lineStyle": {"color": colours.muted}},
        }
        for number, each in enumerate(dimensions)
    ]
    options["series"] = [
        {
            "type": "parallel",
            "lineStyle": {"width": 1.5, "opacity": 0.6, "color": colours.series[0]},
            "data": [[*line] for line in lines],
        }
    ]
    if coloured_by is not None:
        numbers = [line[coloured_by] for line in lines if isinstance(line[coloured_by], (int, float))]
        if numbers:
            options["visualMap"] = {
                "dimension": coloured_by,
                "min": min(numbers),  # type: ignore[type-var]
                "max": max(numbers),  # type: ignore[type-var]
                "orient": "horizontal",
                "left": "center",
                "bottom": 0,
                "precision": 4,
                "text": [dimensions[coloured_by].name, ""],
                "calculable": True,
                "textStyle": {"color": colours.ink},
                "inRange": {"color": [*colours.ramp[1:]]},
            }
    return options
