"""Distributions of the columns of a view: histograms of rows that are read for the person who looks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from nicegui import ui

from falaj.apps.console.charts.element import chart
from falaj.apps.console.charts.histograms import histogram
from falaj.apps.console.charts.palette import palette
from falaj.apps.console.components.states import empty_state
from falaj.apps.console.page import PageContext
from falaj.apps.console.times import Times, number
from falaj.records.features import NUMBERS, ColumnType, StoredView
from falaj.sdk.platform import Platform

SAMPLED = 20_000
"""Rows that are read, in their order of arrival."""
BINS, WORDS = 20, 12
MOST_COLUMNS = 24


@dataclass(frozen=True)
class Sample:
    """Rows of a view by column; `whole`: all of its rows."""

    columns: Mapping[str, Sequence[Any]]
    rows: int
    whole: bool
    newest: datetime | None = None


@dataclass(frozen=True)
class Distribution:
    """One column: labels and counts of its bins or commonest values, and how many of the rows have none."""

    column: str
    type: str
    labels: tuple[str, ...]
    counts: tuple[int, ...]
    empty_share: float
    summary: str


@dataclass(frozen=True)
class DistributionsView:
    about: str
    newest: str
    distributions: tuple[Distribution, ...]
    left_out: int


def distributions(view: StoredView, sample: Sample, *, times: Times) -> DistributionsView:
    """Return the histograms of the columns of a view."""
    typed = {each.name: each.type for each in (*view.keys, *view.definition.columns)}
    shown = [name for name in typed if name in sample.columns]
    about = (
        f"all {number(sample.rows)} rows"
        if sample.whole
        else f"the first {number(sample.rows)} of {number(view.rows)} rows, in their order of arrival"
    )
    return DistributionsView(
        about=about,
        newest=times.moment(sample.newest) if sample.whole else "",
        distributions=tuple(
            distribution(name, typed[name], sample.columns[name]) for name in shown[:MOST_COLUMNS]
        ),
        left_out=max(len(shown) - MOST_COLUMNS, 0),
    )


def distribution(column: str, kind: ColumnType, values: Sequence[Any]) -> Distribution:
    """Return the histogram of one column: equal bins for numbers and times, the commonest values for the rest."""
    there = [each for each in values if each is not None and not _is_nan(each)]
    empty = 1 - len(there) / len(values) if values else 0.0
    if kind in NUMBERS or kind is ColumnType.MOMENT:
        labels, counts, summary = _binned(there, kind)
    else:
        labels, counts, summary = _counted(there)
    return Distribution(column, kind.value, labels, counts, empty, summary)


def _binned(values: Sequence[Any], kind: ColumnType) -> tuple[tuple[str, ...], tuple[int, ...], str]:
    figures = [_figure(each) for each in values]
    finite = [each for each in figures if math.isfinite(each)]
    if not finite:
        return (), (), "no values"
    low, high = min(finite), max(finite)
    write = _moment if kind is ColumnType.MOMENT else number
    middle = sorted(finite)[len(finite) // 2]
    summary = f"{write(low)} to {write(high)}, median {write(middle)}"
    if low == high:
        return (write(low),), (len(finite),), summary
    width = (high - low) / BINS
    counts = [0] * BINS
    for each in finite:
        counts[min(int((each - low) / width), BINS - 1)] += 1
    labels = tuple(f"{write(low + width * n)} – {write(low + width * (n + 1))}" for n in range(BINS))
    return labels, tuple(counts), summary


def _counted(values: Sequence[Any]) -> tuple[tuple[str, ...], tuple[int, ...], str]:
    counted = Counter(str(each) for each in values)
    common = counted.most_common(WORDS)
    rest = len(values) - sum(count for _, count in common)
    labels = [name for name, _ in common] + ([f"{len(counted) - WORDS} others"] if rest else [])
    counts = [count for _, count in common] + ([rest] if rest else [])
    different = "1 value" if len(counted) == 1 else f"{number(len(counted))} different values"
    return tuple(labels), tuple(counts), different if counted else "no values"


def _figure(value: Any) -> float:
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    return float(value)


def _moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


# ------------------------------------------------------------------------------------------- drawing


def read_sample(platform: Platform, view: StoredView) -> Sample:
    """Read the first rows of a view, with the rights of the person; the stream is closed once there are enough."""
    reader: Any = platform.features.scan(view.id, version=view.version)
    columns: dict[str, list[Any]] = {}
    rows = 0
    try:
        for batch in reader:
            taken = batch.slice(0, SAMPLED - rows)
            for name in taken.schema.names:
                columns.setdefault(name, []).extend(taken.column(name).to_pylist())
            rows += taken.num_rows
            if rows >= SAMPLED:
                break
    finally:
        reader.close()
    moments = [each for each in columns.get(view.definition.event_time, ()) if each is not None]
    newest = max(moments, default=None)
    if newest is not None and newest.tzinfo is None:
        newest = newest.replace(tzinfo=UTC)
    return Sample(columns, rows, rows >= view.rows, newest)


def draw_distributions(context: PageContext, view: DistributionsView, name: str) -> None:
    if not view.distributions:
        empty_state(
            "The view has no rows yet.", command=f"falaj features ingest {name} FILE", icon="bar_chart"
        )
        return
    ui.label(f"Of {view.about}. Read for you now, and recorded in the audit log.").classes("muted small")
    colours = palette(context.is_dark)
    with ui.element("div").classes("small-charts"):
        for each in view.distributions:
            with ui.element("section").classes("panel"):
                ui.label(each.column).classes("panel-title wrap").props("role=heading aria-level=2")
                ui.label(f"{each.type} · {each.summary} · {each.empty_share:.1%} empty").classes(
                    "muted small"
                )
                if each.counts:
                    title = f"Histogram of {each.column}, {view.about}"
                    options = histogram(each.labels, each.counts, colours, title=title, name="rows")
                    chart(options, height_px=220)
    if view.left_out:
        ui.label(f"{view.left_out} more columns are not shown.").classes("muted small")
