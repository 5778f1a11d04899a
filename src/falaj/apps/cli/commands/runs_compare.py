"""`falaj runs compare`: parameters that differ, metrics side by side, and curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from falaj.apps.cli.names import completion_of, full_id
from falaj.apps.cli.output.tables import show_rows
from falaj.apps.cli.output.values import encodable, format_number, printable
from falaj.apps.cli.session import Session
from falaj.errors import InvalidInput
from falaj.records.record import Record
from falaj.records.tracking import MetricCurve, RunDetails
from falaj.sdk.platform import Platform

MOST_RUNS, MOST_METRICS = 20, 100
CURVE_WIDTH = 24
"""Characters of a sparkline."""
BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = "_.-=+*%#"


class RunComparison(Record):
    """Runs side by side: the parameters that differ, by key and run, and the metrics with their curves."""

    runs: tuple[RunDetails, ...]
    params: dict[str, dict[str, str | None]]
    curves: tuple[MetricCurve, ...] = ()


def compare_runs(
    session: Session,
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Two runs or more: ids or the beginnings of them, names, or last.",
            autocompletion=completion_of("run"),
        ),
    ],
    *,
    metrics: Annotated[
        str, typer.Option(metavar="METRICS", help="Compare these metrics, such as auc,loss. (default: all)")
    ] = "",
) -> None:
    """Compare runs: parameters that differ, metrics side by side, and their curves."""
    if not 2 <= len(runs) <= MOST_RUNS:
        raise InvalidInput.at("RUN", given=f"{len(runs)} runs", allowed=f"2 to {MOST_RUNS} runs")
    with session.platform() as platform:
        idents = dict.fromkeys(full_id(platform, "run", each) for each in runs)
        found = compare(platform, list(idents), [key.strip() for key in metrics.split(",") if key.strip()])
    session.show(found, _show)


def compare(platform: Platform, idents: Sequence[str], keys: Sequence[str]) -> RunComparison:
    """Return runs side by side; of many metrics the first are compared unless some are named."""
    found = tuple(platform.runs.show(each) for each in idents)
    wanted = keys or sorted({metric.key for each in found for metric in each.metrics})[:MOST_METRICS]
    curves = (
        platform.runs.curves(idents[0], tuple(wanted), others=tuple(idents[1:]), points=2 * CURVE_WIDTH)
        if wanted
        else ()
    )
    return RunComparison(runs=found, params=_differing(found), curves=curves)


def _differing(found: Sequence[RunDetails]) -> dict[str, dict[str, str | None]]:
    """Return the parameters that are not the same in all runs, by key and run."""
    values = {str(each.run.id): {param.key: param.value for param in each.params} for each in found}
    keys = sorted({key for params in values.values() for key in params})
    table = {key: {run: params.get(key) for run, params in values.items()} for key in keys}
    return {key: row for key, row in table.items() if len(set(row.values())) > 1}


def _show(found: RunComparison) -> None:
    idents = [each.run.id for each in found.runs]
    names = [printable(each.run.name) for each in found.runs]
    show_rows(["run", *names], [["id", *idents], ["status", *(each.run.status.value for each in found.runs)]])
    if found.params:
        rows = [
            [printable(key), *(printable(row[run] or "-")[:40] for run in idents)]
            for key, row in found.params.items()
        ]
        print()
        show_rows(["parameter", *names], rows)
    curves = {(str(curve.run), curve.key): curve for curve in found.curves}
    keys = list(dict.fromkeys(curve.key for curve in found.curves))
    if not keys:
        return
    last = {each.run.id: {metric.key: metric.last for metric in each.metrics} for each in found.runs}
    print()
    show_rows(
        ["metric", *names], [[key, *(format_number(last[run].get(key)) for run in idents)] for key in keys]
    )
    print()
    show_rows(["curve", *names], [[key, *_sparklines(curves, key, idents)] for key in keys])


def _sparklines(curves: Mapping[tuple[str, str], MetricCurve], key: str, idents: Sequence[str]) -> list[str]:
    """Return the curves of one metric on one scale, so that they can be compared."""
    chosen = [curves.get((run, key)) for run in idents]
    values = [[point.value for point in curve.points] if curve else [] for curve in chosen]
    numbers = [value for some in values for value in some if math.isfinite(value)]
    low, high = (min(numbers), max(numbers)) if numbers else (0.0, 0.0)
    return [sparkline(some, low=low, high=high) for some in values]


def sparkline(values: Sequence[float], *, low: float, high: float) -> str:
    """Return values as bars between `low` and `high`; NaN is a gap, and infinities are at the ends."""
    if not values:
        return "-"
    size = min(len(values), CURVE_WIDTH)
    shown = [_peak(values[at * len(values) // size : (at + 1) * len(values) // size]) for at in range(size)]
    text = "".join(" " if value is None else BARS[_height(value, low, high)] for value in shown)
    is_plain = encodable(text) != text
    return text.translate(str.maketrans(BARS, PLAIN_BARS)) if is_plain else text


def _peak(values: Sequence[float]) -> float | None:
    """Return the value of a stretch that is farthest from its middle one, so that a peak shows."""
    numbers = sorted(value for value in values if not math.isnan(value))
    if not numbers:
        return None
    middle = numbers[len(numbers) // 2]
    return middle if math.isinf(middle) else max(numbers, key=lambda value: abs(value - middle))


def _height(value: float, low: float, high: float) -> int:
    if math.isinf(value):
        return len(BARS) - 1 if value > 0 else 0
    if high <= low:
        return len(BARS) // 2
    return min(int((value - low) / (high - low) * len(BARS)), len(BARS) - 1)
