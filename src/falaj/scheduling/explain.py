"""Why a job waits, in words: what binds, where it stands, what would let it start, and when it will."""

from __future__ import annotations

from falaj.errors import NotFound
from falaj.records.scheduling import Explanation, Reason, Request, Running, Snapshot, Start
from falaj.scheduling.changes import changes_that_start
from falaj.scheduling.constraints import in_words
from falaj.scheduling.decide import Turns, in_order
from falaj.scheduling.forecast import expected_start
from falaj.scheduling.words import places


def explain(snapshot: Snapshot, job: str) -> Explanation:
    """What is to be said about `job`; NotFound if it neither waits nor runs."""
    for running in snapshot.running:
        if running.request.job == job:
            return _of_running(running, of=len(snapshot.pending))
    turns = Turns(snapshot)
    for position, request in enumerate(in_order(snapshot.pending), start=1):
        if request.job == job:
            return _of_pending(snapshot, request, turns, position)
        turns.take(request)
    raise NotFound(f"no job {job} waits or runs")


def _of_running(running: Running, *, of: int) -> Explanation:
    words = f"runs on {places(running.placements)} since {running.started_at:%Y-%m-%d %H:%M:%S %Z}"
    return Explanation(job=running.request.job, state="running", words=words, of=of)


def _of_pending(snapshot: Snapshot, request: Request, turns: Turns, position: int) -> Explanation:
    """`turns` stands just before the job's own turn."""
    found = turns.judge(request)
    if isinstance(found, Reason):
        return Explanation(
            job=request.job,
            state="waiting",
            reason=found,
            would_start=changes_that_start(snapshot, request, found, turns),
            words=in_words(found, request, turns),
            position=position,
            of=len(snapshot.pending),
            expected_start=expected_start(snapshot, request.job),
        )
    start = turns.take(request)
    where = places(start.placements) if isinstance(start, Start) else ""
    return Explanation(
        job=request.job,
        state="starting",
        words=f"starts now on {where}",
        position=position,
        of=len(snapshot.pending),
        expected_start=snapshot.now,
    )
