"""Breakdown of the time of a step: every moment is assigned once, to what it was spent on.

On a GPU a moment belongs to the running kernels; if there are none, to communication, then to a copy; if the
GPU is idle, to what the process was doing: waiting for data, or launching work. On a CPU it belongs to the
running operation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from falaj.training.runtime.profiling.events import PREFIX, TraceEvent

Part = Literal[
    "input", "copy", "forward", "backward", "optimizer", "compute", "communication", "launch", "python"
]
PARTS: tuple[Part, ...] = get_args(Part)
"""input: waiting for data. copy: from the host to the device. compute: outside of the phases, as in a CUDA graph.
launch: inside of a phase, but nothing is computed yet. python: between the phases of a step."""
PHASES: tuple[Part, ...] = ("forward", "backward", "optimizer")
COMPUTED: tuple[Part, ...] = (*PHASES, "compute")


@dataclass(frozen=True)
class Overlap:
    """Seconds that an activity took in the profiled steps, and how many of them overlapped with computing."""

    took: float = 0.0
    hidden: float = 0.0

    @property
    def share(self) -> float:
        return self.hidden / self.took if self.took else 0.0


@dataclass(frozen=True)
class TimeBreakdown:
    """Shares of the time of a step; they add up to 1."""

    of: dict[Part, float]
    steps: int
    step_s: float
    on_gpu: bool
    copies: Overlap
    communication: Overlap

    @property
    def computing(self) -> float:
        return sum(self.of[part] for part in COMPUTED)


def time_breakdown(events: Sequence[TraceEvent]) -> TimeBreakdown:
    """Return the breakdown of the steps among `events`. Raise ValueError if there is none."""
    by_range = ranges_of(events)
    window = difference(union(by_range.get("step", [])), by_range.get("aside", []))
    if not window:
        raise ValueError("the events contain no step")
    on_gpu = any(event.kind == "kernel" for event in events)
    took = kernels_by_phase(events, by_range) if on_gpu else operations_by_phase(events, by_range)
    communication = _intervals(events, "communication")
    copies = _intervals(events, "copy")
    computing = union(each for moments in took.values() for each in moments)
    claims: list[tuple[Part, Intervals]] = [(part, took[part]) for part in COMPUTED]
    claims += [("communication", communication), ("copy", copies), ("input", by_range.get("data", []))]
    claims += [("launch", union(each for phase in PHASES for each in by_range.get(phase, [])))]
    found = assign_time(window, claims)
    total = total_seconds(window)
    of = {part: found.get(part, 0.0) / total for part in PARTS}
    of["python"] += 1.0 - sum(of.values())
    steps = sum(1 for event in events if event.name == f"{PREFIX}step")
    return TimeBreakdown(
        of,
        steps,
        total / steps,
        on_gpu,
        overlap(intersection(copies, window), computing),
        overlap(intersection(communication, window), computing),
    )


def assign_time(window: Intervals, claims: Iterable[tuple[Part, Intervals]]) -> dict[Part, float]:
    """Return the seconds of `window` per claim; a moment belongs to the first claim."""
    found: dict[Part, float] = {}
    for part, moments in claims:
        found[part] = total_seconds(intersection(window, moments))
        window = difference(window, moments)
    return found


def overlap(moments: Intervals, computing: Intervals) -> Overlap:
    return Overlap(total_seconds(moments), total_seconds(intersection(moments, computing)))


def ranges_of(events: Iterable[TraceEvent]) -> dict[str, Intervals]:
    """Return our own ranges by name."""
    found: dict[str, Intervals] = {}
    for event in events:
        if event.kind == "range":
            found.setdefault(event.name.removeprefix(PREFIX), []).append((event.start, event.end))
    return {name: union(moments) for name, moments in found.items()}


def operations_by_phase(
    events: Iterable[TraceEvent], by_range: dict[str, Intervals]
) -> dict[Part, Intervals]:
    """Return what a CPU computed in each phase; starting communication does not count."""
    operations = union(
        (event.start, event.end)
        for event in events
        if event.kind == "operation" and not event.name.startswith("c10d::")
    )
    found: dict[Part, Intervals] = {
        phase: intersection(operations, by_range.get(phase, [])) for phase in PHASES
    }
    marked = union(each for name in (*PHASES, "data") for each in by_range.get(name, []))
    return found | {"compute": difference(operations, marked)}


def kernels_by_phase(events: Iterable[TraceEvent], by_range: dict[str, Intervals]) -> dict[Part, Intervals]:
    """Return what a GPU computed for each phase: the one in which a kernel was launched."""
    launched = {event.correlation: event.start for event in events if event.kind == "launch"}
    parts: dict[Part, Intervals] = {part: [] for part in COMPUTED}
    for event in events:
        if event.kind == "kernel":
            at = launched.get(event.correlation)
            phase = next(
                (p for p in PHASES if at is not None and contains(by_range.get(p, []), at)), "compute"
            )
            parts[phase].append((event.start, event.end))  # type: ignore[index]
    return {part: union(moments) for part, moments in parts.items()}


def contains(moments: Intervals, moment: float) -> bool:
    place = bisect_right(moments, (moment, float("inf"))) - 1
    return place >= 0 and moments[place][0] <= moment < moments[place][1]


def _intervals(events: Iterable[TraceEvent], kind: str) -> Intervals:
    return union((event.start, event.end) for event in events if event.kind == kind)


Interval: TypeAlias = tuple[float, float]
Intervals: TypeAlias = list[Interval]
"""Sorted intervals that do not touch."""


def union(intervals: Iterable[Interval]) -> Intervals:
    """Return the union of intervals in any order."""
    found: Intervals = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """Return the moments that are in both."""
    return difference(one, difference(one, other))


def difference(one: Intervals, other: Intervals) -> Intervals:
    """Return the moments of `one` that are not in `other`."""
    found: Intervals = []
    at = 0
    for start, end in one:
        while at < len(other) and other[at][1] <= start:
            at += 1
        place = at
        while place < len(other) and other[place][0] < end:
            if start < other[place][0]:
                found.append((start, other[place][0]))
            start = other[place][1]
            place += 1
        if start < end:
            found.append((start, end))
    return found


def total_seconds(moments: Intervals) -> float:
    return sum(end - start for start, end in moments)
