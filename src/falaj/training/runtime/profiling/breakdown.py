"""From events to shares of the step's time: every moment of a step is counted once, for what held it up.

On a GPU a moment belongs to the kernels that run; where none does, to communication, then to a copy; where the GPU
does nothing, to what the process was doing: waiting for data, or sending work to the GPU too slowly. On a CPU it
belongs to the operation that runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from falaj.training.runtime.profiling.events import PREFIX, TraceEvent

Part = Literal[
    "input", "copy", "forward", "backward", "optimizer", "compute", "communication", "launch", "python"
]
PARTS: tuple[Part, ...] = get_args(Part)
"""input: waiting for data. copy: from the host to the device. compute: what belongs to none of the parts, as in a CUDA
graph. launch: inside of a step, but nothing is computed yet. python: between the parts of a step."""
PHASES: tuple[Part, ...] = ("forward", "backward", "optimizer")
COMPUTED: tuple[Part, ...] = (*PHASES, "compute")


@dataclass(frozen=True)
class Overlap:
    """Seconds of the profiled steps that something took, and how many of them ran beside computing."""

    took: float = 0.0
    hidden: float = 0.0

    @property
    def share(self) -> float:
        return self.hidden / self.took if self.took else 0.0


@dataclass(frozen=True)
class TimeBreakdown:
    """Of the time of a step; they add up to 1."""

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
    """Where the time of the steps among `events` went; there must be one."""
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
    """Seconds of `window` for each claim; a moment goes to the first that claims it."""
    found: dict[Part, float] = {}
    for part, moments in claims:
        found[part] = total_seconds(intersection(window, moments))
        window = difference(window, moments)
    return found


def overlap(moments: Intervals, computing: Intervals) -> Overlap:
    return Overlap(total_seconds(moments), total_seconds(intersection(moments, computing)))


def ranges_of(events: Iterable[TraceEvent]) -> dict[str, Intervals]:
    """Our own ranges, by their names."""
    found: dict[str, Intervals] = {}
    for event in events:
        if event.kind == "range":
            found.setdefault(event.name.removeprefix(PREFIX), []).append((event.start, event.end))
    return {name: union(moments) for name, moments in found.items()}


def operations_by_phase(
    events: Iterable[TraceEvent], by_range: dict[str, Intervals]
) -> dict[Part, Intervals]:
    """What a CPU computed in each phase; handing something to communication is not computing."""
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
    """What a GPU computed for each phase: for the one in which it was sent, whenever it ran."""
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
