"""Compare two replays of the same jobs: in the current world and in a changed one."""

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
    """Replay `past` without and with `changes` by the same simulator, and return both results side by side."""
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
        words=tuple(remarks(world, before, after, seen)),
    )


def half(progress: Progress | None, number: int) -> Progress | None:
    """Return a callback that reports the first or second replay as half of the whole."""
    if progress is None:
        return None
    report: Callable[[int, int], None] = progress
    return lambda done, of: report(number * of + done, 2 * of)


def teams(before: SimulationResult, after: SimulationResult) -> tuple[TeamComparison, ...]:
    later: dict[str, SimulationFigures] = {team.queue: team.figures for team in after.teams}
    return tuple(
        TeamComparison(queue=team.queue, before=team.figures, after=later[team.queue])
        for team in before.teams
    )


def observed(past: Sequence[PastJob], before: SimulationResult) -> ObservedFigures | None:
    """Return measured and simulated waits of the jobs whose real wait is known and that started in the replay."""
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


def remarks(
    world: SimulatedCluster, before: SimulationResult, after: SimulationResult, seen: ObservedFigures | None
) -> list[str]:
    words = ["both columns are replays of the same jobs by the same simulator; only the changes differ"]
    if seen is None:
        words.append("the real waits of these jobs are unknown, so the replay is not validated")
    else:
        words.append(
            f"validation: without changes the replay's mean wait is {format_duration(seen.simulated_wait.mean)} and "
            f"{count_of(seen.simulated_preemptions, 'preemption')}; measured were "
            f"{format_duration(seen.wait.mean)} and {count_of(seen.preemptions, 'preemption')}"
        )
    words.append(describe_assumptions(world.assume))
    if not world.budgets:
        words.append("budgets are not replayed")
    for when, replay in (("without", before), ("with", after)):
        if count := replay.total.never_started:
            words.append(
                f"{when} the changes {count_of(count, 'job')} never started; their waits are not counted"
            )
    return words


def describe_assumptions(assume: Assumptions) -> str:
    saved = (
        f"the work since the last checkpoint, one every {format_duration(assume.checkpoint_every)}"
        if assume.checkpoint_every
        else "no work"
    )
    return (
        f"assumed: a preempted job stops within {format_duration(assume.grace)} and loses {saved}; "
        f"the usage history of queues has a half-life of {format_duration(assume.half_life)}"
    )
