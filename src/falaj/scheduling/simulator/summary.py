"""Summarise a replay: waits, slowdown, utilisation, preemptions and cost, by team and in total."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta

from falaj.records.scheduling.simulation import (
    NO_TIME,
    SimulationFigures,
    SimulationResult,
    TeamFigures,
    WaitTimes,
)
from falaj.scheduling.simulator.simulated_job import SimulatedJob
from falaj.scheduling.simulator.usage_meter import UsageMeter

SHORTEST = timedelta(seconds=10)


def summarise(cases: Sequence[SimulatedJob], meter: UsageMeter, decisions: int) -> SimulationResult:
    teams: dict[str, list[SimulatedJob]] = defaultdict(list)
    for case in cases:
        teams[case.request.queue].append(case)
    return SimulationResult(
        began=meter.begin,
        ended=meter.last_end,
        jobs=tuple(case.outcome() for case in cases),
        teams=tuple(
            TeamFigures(queue=name, figures=figures_of(teams[name], meter)) for name in sorted(teams)
        ),
        total=figures_of(cases, meter),
        fairness=meter.dues.fairness(),
        decisions=decisions,
    )


def figures_of(cases: Sequence[SimulatedJob], meter: UsageMeter) -> SimulationFigures:
    gpu_hours, cpu_hours = sum(case.gpu_hours for case in cases), sum(case.cpu_hours for case in cases)
    gpus_there, cpus_there = meter.there
    ended = [case for case in cases if case.ended_at is not None]
    return SimulationFigures(
        jobs=len(cases),
        ended=len(ended),
        timed_out=sum(case.end == "timed-out" for case in cases),
        never_started=sum(case.started_at is None for case in cases),
        wait=waits([case.started_at - case.past.request.submitted_at for case in cases if case.started_at]),
        slowdown=sum(slowdown(case) for case in ended) / len(ended) if ended else 0.0,
        preemptions=sum(case.evicted for case in cases),
        lost=sum((case.lost for case in cases), NO_TIME),
        gpu_hours=gpu_hours,
        cpu_hours=cpu_hours,
        cost=sum(case.cost for case in cases),
        gpu_use=gpu_hours / gpus_there if gpus_there else 0.0,
        cpu_use=cpu_hours / cpus_there if cpus_there else 0.0,
    )


def waits(spans: Sequence[timedelta]) -> WaitTimes:
    if not spans:
        return WaitTimes()
    ordered = sorted(spans)
    return WaitTimes(
        mean=sum(ordered, NO_TIME) / len(ordered), median=quantile(ordered, 0.5), p95=quantile(ordered, 0.95)
    )


def quantile(ordered: Sequence[timedelta], part: float) -> timedelta:
    """Return the quantile by linear interpolation."""
    at = part * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def slowdown(case: SimulatedJob) -> float:
    """Return the bounded slowdown: turnaround time divided by run time of at least 10 s."""
    if case.ended_at is None:
        raise ValueError(f"job {case.request.job} has not ended")
    return max((case.ended_at - case.past.request.submitted_at) / max(case.computed, SHORTEST), 1.0)
