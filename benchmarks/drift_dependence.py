"""False alarms of drift monitors where rows depend on each other, and the shifts that they still find.

A monitor is a reference and 30 successive windows of the same stream (A/A): at most 5 % of them may raise an alarm. The
peer is the same test with rows taken as independent. Flights are those of New York in 2013: the reference is made of
half of the days of the year, the windows are days of the other half.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from dependent_streams import BEGIN, DAY_S, StreamMaker, cut, pinned, pinned_columns
from falaj.monitoring.drift.verdicts import detect_drift
from falaj.monitoring.sketches.sketchers import WindowSketcher
from falaj.records.monitoring.sketches import (
    ColumnKind,
    FalseAlarmBudget,
    ReferenceSketch,
    RowDependence,
    WindowSketch,
)
from harness import Result, Rule, report, say

QUICK = True
MONITORS, LOOKS, REFERENCE_DAYS = 20, 30, 60
STREAMS = {
    "independent": ("none", 0.0),
    "weak day effects (0.1 sd)": ("days", 0.1),
    "day effects (0.5 sd)": ("days", 0.5),
    "AR(1) by hour (1 sd)": ("autoregressive", 1.0),
    "entities in bursts of 20": ("bursts", 0.0),
}
SHIFTS = {"independent": 0.3, "weak day effects (0.1 sd)": 1.0, "entities in bursts of 20": 1.0}
FLIGHT_COLUMNS = ("delay", "late", "hour", "weekday", "distance", "carrier", "origin")
AS_INDEPENDENT = FalseAlarmBudget(dependence=RowDependence.NONE)


def main() -> None:
    results = []
    for name, (kind, strength) in STREAMS.items():
        rng = np.random.default_rng(26)
        ours, theirs = false_alarms(StreamMaker(kind, strength, rng=rng))
        what = f"monitors with a false alarm in 30 day windows, %: {name}"
        results.append(Result(what, 100 * ours, max(100 * theirs, 1e-9), 5, Rule.FALAJ_AT_MOST))
        if name in SHIFTS:
            found, before = detections(StreamMaker(kind, strength, rng=rng), shift=SHIFTS[name])
            what = f"day windows with a shift of {SHIFTS[name]} sd that alarm, %: {name}"
            results.append(Result(what, 100 * found, 100 * before, 90, Rule.FALAJ_AT_LEAST))
    ours, theirs, days = flights()
    say(f"days of flights that alarmed: {days}")
    results.append(
        Result("day windows of flights that alarm, %", 100 * ours, 100 * theirs, 2, Rule.FALAJ_AT_MOST)
    )
    report("drift_dependence", results)


def false_alarms(maker: StreamMaker) -> tuple[float, float]:
    """Return the share of monitors with an alarm among their windows; with rows as they are, and as independent."""
    found = [[any(alarms) for alarms in looked(maker)] for _ in range(MONITORS)]
    ours, theirs = zip(*found, strict=True)
    return float(np.mean(ours)), float(np.mean(theirs))


def detections(maker: StreamMaker, *, shift: float) -> tuple[float, float]:
    """Return the share of shifted windows that alarm."""
    found = [[np.mean(alarms) for alarms in looked(maker, shift=shift)] for _ in range(3)]
    ours, theirs = zip(*found, strict=True)
    return float(np.mean(ours)), float(np.mean(theirs))


def looked(maker: StreamMaker, *, shift: float = 0.0) -> tuple[list[bool], list[bool]]:
    stream = maker.make(REFERENCE_DAYS + LOOKS)
    reference = pinned(stream.between(0, REFERENCE_DAYS))
    windows = [
        cut(stream, REFERENCE_DAYS + day, REFERENCE_DAYS + day + 1, shift=shift) for day in range(LOOKS)
    ]
    return alarms_of(reference, windows)


def alarms_of(reference: ReferenceSketch, windows: Sequence[WindowSketch]) -> tuple[list[bool], list[bool]]:
    ours = [bool(detect_drift(reference, window).drifted) for window in windows]
    return ours, [bool(detect_drift(reference, each, budget=AS_INDEPENDENT).drifted) for each in windows]


def flights(*, splits: int = 3) -> tuple[float, float, list[str]]:
    """Return the share of day windows that alarm, the same as independent rows, and the days that did."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "flights"))
    from data import load_flights

    table = load_flights().to_pandas()
    seconds = (table.event_time - BEGIN).dt.total_seconds().to_numpy()
    columns: dict[str, Any] = {name: table[name].to_numpy() for name in FLIGHT_COLUMNS}
    kinds = {
        name: ColumnKind.CATEGORICAL if c.dtype == object else ColumnKind.NUMERIC
        for name, c in columns.items()
    }
    number = (seconds // DAY_S).astype(int)
    by_day = [np.flatnonzero(number == day) for day in range(365)]
    rng = np.random.default_rng(2013)
    found: list[tuple[bool, bool]] = []
    alarmed: set[int] = set()
    for _ in range(splits):
        days = rng.permutation(365)
        rows = np.concatenate([by_day[day] for day in days[:180]])
        reference = pinned_columns(seconds[rows], {name: column[rows] for name, column in columns.items()})
        for day in days[180:]:
            sketcher = WindowSketcher("flights@1", features=kinds)
            sketcher.update({name: column[by_day[day]] for name, column in columns.items()})
            begin = BEGIN + timedelta(days=int(day))
            (ours,), (theirs,) = alarms_of(
                reference, [sketcher.cut(since=begin, until=begin + timedelta(days=1))]
            )
            found.append((ours, theirs))
            alarmed |= {int(day)} if ours else set()
    ours_share, theirs_share = np.mean(found, axis=0)
    named = [f"{BEGIN + timedelta(days=day):%d %b}" for day in sorted(alarmed)]
    return float(ours_share), float(theirs_share), named


if __name__ == "__main__":
    main()
