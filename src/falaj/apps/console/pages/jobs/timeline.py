"""The last day of jobs: how many are in each state, and on which nodes and GPUs they ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from falaj.apps.console.charts.grids import GanttBar
from falaj.records.scheduling.hardware import Machine
from falaj.records.scheduling.snapshot import Placement
from falaj.records.training.jobs import Job, JobState

DAY = timedelta(days=1)
SHORTEST = 1 / 300
"""A job is drawn at least as so much of the time that is shown, so that a short one can be seen."""
NAME_CHARACTERS = 60
DAY_JOBS = 1000
"""So many jobs of the last day are drawn at most."""


@dataclass(frozen=True)
class DayView:
    """How many jobs of the last day are in each state, and the spans of the Gantt chart up to `now_ms`."""

    counts: tuple[tuple[str, int], ...]
    spans: tuple[GanttBar, ...]
    now_ms: float
    is_cut: bool


def day_view(jobs: Sequence[Job], machines: Sequence[Machine], *, now: datetime) -> DayView:
    """Return what is shown of the last day. It is drawn up to the full minute, so that it seldom changes."""
    until = now.replace(second=0, microsecond=0) + timedelta(minutes=1)
    states = Counter(str(job.state) for job in jobs)
    spans = job_spans(jobs, machines, since=until - DAY, now=until)
    return DayView(
        counts=tuple((str(state), states[str(state)]) for state in JobState),
        spans=spans,
        now_ms=1000 * until.timestamp() if spans else 0.0,
        is_cut=len(jobs) >= DAY_JOBS,
    )


def job_spans(
    jobs: Sequence[Job], machines: Sequence[Machine], *, since: datetime, now: datetime
) -> tuple[GanttBar, ...]:
    """Return the newest attempts that ran after `since`: a span for each GPU, or for the node where there is none."""
    gpus = gpu_names(machines)
    ran = [job for job in jobs if job.started_at is not None and since < (job.ended_at or now)]
    first = min((max(job.started_at or now, since) for job in ran), default=now)
    shortest = SHORTEST * (now - first)
    found = [
        GanttBar(
            lane, job.name[:NAME_CHARACTERS], 1000 * begin.timestamp(), 1000 * end.timestamp(), job.state
        )
        for job in ran
        if job.started_at is not None
        and (begin := max(job.started_at, since)) < now
        and (end := min(now, max(job.ended_at or now, begin + shortest)))
        for lane in dict.fromkeys(name for placed in job.placements for name in lanes(placed, gpus))
    ]
    return tuple(sorted(found, key=lambda span: (span.lane, span.begin_ms)))


def lanes(placed: Placement, gpus: Mapping[str, str]) -> list[str]:
    """Return the lanes that a replica takes: `node GPU 0`, or `node CPUs`."""
    named = [f"{placed.node} {gpus.get(gpu, gpu[:12])}" for gpu in placed.gpus]
    return named or [f"{placed.node} CPUs"]


def gpu_names(machines: Sequence[Machine]) -> dict[str, str]:
    """Return the GPUs and MIG slices of all machines by id, named by their index: GPU 0, GPU 0 slice 2."""
    found: dict[str, str] = {}
    for machine in machines:
        found |= {gpu.id: f"GPU {at}" for at, gpu in enumerate(machine.node.gpus)}
        for card in machine.cards:
            found[card.id] = f"GPU {card.index}"
            found |= {each.id: f"GPU {card.index} slice {at}" for at, each in enumerate(card.slices)}
    return found
