"""What if: the same jobs replayed twice, in the world as it is and in the world as it might be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from falaj.records.scheduling.simulation import (
    Assumptions,
    Changes,
    ObservedFigures,
    PastJob,
    SimulatedCluster,
    SimulationFigures,
    SimulationResult,
    TeamComparison,
    WhatIfComparison,
)
from falaj.scheduling.explanation.formatting import count_of, format_duration
from falaj.scheduling.simulator.changes import apply_changes, describe_changes
from falaj.scheduling.simulator.engine import Progress, simulate
from falaj.scheduling.simulator.policies import Scheduler
from falaj.scheduling.simulator.summary import waits


def what_if(
    past: Sequence[PastJob],
    world: SimulatedCluster,
    changes: Changes,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    scheduler: Scheduler | None = None,
    progress: Progress | None = None,
) -> WhatIfComparison:
    """Both replays are made by the same machinery, so what differs between them comes from the changes alone."""
    other = apply_changes(world, changes)
    before = simulate(past, world, scheduler=scheduler, progress=half(progress, 0))
    after = simulate(past, other, scheduler=scheduler, progress=half(progress, 1))
    seen = observed(past, before)
    return WhatIfComparison(
        since=since or before.began,
        until=until or before.ended,
        jobs=len(past),
        changes=describe_changes(world, changes),
        teams=teams(before, after),
        before=before.total,
        after=after.total,
        fairness_before=before.fairness,
        fairness_after=after.fairness,
        observed=seen,
        words=tuple(said(world, before, after, seen)),
    )


def half(progress: Progress | None, number: int) -> Progress | None:
    """Two replays are told of as one."""
    if progress is None:
        return None
    tell: Callable[[int, int], None] = progress
    return lambda done, of: tell(number * of + done, 2 * of)


def teams(before: SimulationResult, after: SimulationResult) -> tuple[TeamComparison, ...]:
    later: dict[str, SimulationFigures] = {team.queue: team.figures for team in after.teams}
    return tuple(
        TeamComparison(queue=team.queue, before=team.figures, after=later[team.queue])
        for team in before.teams
    )


def observed(past: Sequence[PastJob], before: SimulationResult) -> ObservedFigures | None:
    """Over the jobs of which it is known how long they really waited, and that started in the replay too."""
    real = {job.request.job: job for job in past if job.waited is not None}
    pairs = [(real[job.job], job) for job in before.jobs if job.job in real and job.wait is not None]
    if not pairs:
        return None
    return ObservedFigures(
        jobs=len(pairs),
        wait=waits([job.waited for job, _ in pairs if job.waited is not None]),
        simulated_wait=waits([outcome.wait for _, outcome in pairs if outcome.wait is not None]),
        preemptions=sum(job.evictions for job, _ in pairs),
        simulated_preemptions=sum(outcome.evicted for _, outcome in pairs),
    )


def said(
    world: SimulatedCluster, before: SimulationResult, after: SimulationResult, seen: ObservedFigures | None
) -> list[str]:
    words = [
        "both columns are replays of the same jobs by the same simulator: they differ by the changes alone"
    ]
    if seen is None:
        words.append(
            "how long these jobs really waited is not known, so the replay is not checked against it"
        )
    else:
        words.append(
            f"check: without changes the replay waits {format_duration(seen.simulated_wait.mean)} on average and "
            f"evicts {count_of(seen.simulated_preemptions, 'time')}; what really happened was "
            f"{format_duration(seen.wait.mean)} and {count_of(seen.preemptions, 'time')}"
        )
    words.append(assumed(world.assume))
    if not world.budgets:
        words.append("budgets are not replayed")
    for when, replay in (("without", before), ("with", after)):
        if count := replay.total.never_started:
            words.append(
                f"{when} the changes {count_of(count, 'job')} never started, for which no wait is counted"
            )
    return words


def assumed(assume: Assumptions) -> str:
    saved = (
        f"what was computed since the last checkpoint, one every {format_duration(assume.checkpoint_every)}"
        if assume.checkpoint_every
        else "nothing of what was computed"
    )
    return (
        f"supposed: an evicted job makes room within {format_duration(assume.grace)} and loses {saved}; "
        f"the history of queues halves in {format_duration(assume.half_life)}"
    )
