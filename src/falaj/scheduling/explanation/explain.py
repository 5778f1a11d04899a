"""Explain a job: the constraint that holds it, its position, changes that would start it, and its expected start."""

from __future__ import annotations

from collections.abc import Iterable

from falaj.errors import NotFound
from falaj.records.scheduling.snapshot import (
    Evict,
    Explanation,
    Placement,
    Reason,
    Request,
    RunningJob,
    Snapshot,
    Start,
    Wait,
)
from falaj.scheduling.capacity.cluster import Cluster
from falaj.scheduling.decision.backlog import Backlog
from falaj.scheduling.decision.decide import all_decisions
from falaj.scheduling.decision.scheduling_round import SchedulingRound
from falaj.scheduling.explanation.constraints import describe_reason
from falaj.scheduling.explanation.forecast import expected_start
from falaj.scheduling.explanation.formatting import format_nodes
from falaj.scheduling.explanation.suggestions import ChangeTrials, starting_changes


def explain(snapshot: Snapshot, job: str) -> Explanation:
    """Return the explanation of a waiting or running job; raise NotFound if there is none of that name."""
    for running in snapshot.running:
        if running.request.job == job:
            return _explain_running(running, snapshot)
    for request in snapshot.pending:
        if request.job == job:
            return _explain_pending(snapshot, request)
    raise NotFound(f"no waiting or running job {job}")


def _explain_running(running: RunningJob, snapshot: Snapshot) -> Explanation:
    words = f"runs on {format_nodes(running.placements)} since {running.started_at:%Y-%m-%d %H:%M:%S %Z}"
    words += on_burst(running.placements, snapshot)
    if running.leaving:
        words += ", being preempted: it saves a checkpoint and goes back to its queue"
    elif running.borrows:
        words += ", borrowing beyond the quota of its queue"
    scheduling_round = SchedulingRound(snapshot, Backlog())
    return Explanation(
        job=running.request.job,
        state="running",
        words=words,
        of=len(snapshot.pending),
        share=share_of(running.request, scheduling_round),
    )


def _explain_pending(snapshot: Snapshot, request: Request) -> Explanation:
    backlog, cluster = Backlog(snapshot.pending), Cluster(snapshot.nodes, snapshot.running)
    full_round = SchedulingRound(snapshot, backlog, cluster)
    share = share_of(request, full_round)
    decisions = all_decisions(full_round.decide_all())
    answers = [decision for decision in decisions if not isinstance(decision, Evict)]
    position = next(at for at, decision in enumerate(answers, start=1) if decision.job == request.job)
    decision = answers[position - 1]
    if isinstance(decision, Start):
        words = f"starts now on {format_nodes(decision.placements)}{on_burst(decision.placements, snapshot)}"
        if decision.borrows:
            words += ", borrowing beyond the quota of its queue"
        return Explanation(
            job=request.job,
            state="starting",
            words=words,
            position=position,
            of=len(snapshot.pending),
            share=share,
            expected_start=snapshot.now,
        )
    leaving = [each.job for each in decisions if isinstance(each, Evict) and each.by == request.job]
    scheduling_round = SchedulingRound(snapshot, backlog, cluster)
    scheduling_round.advance_to(request)
    reason = decision.reason if isinstance(decision, Wait) else Reason.CAPACITY
    trials = ChangeTrials(snapshot, request, backlog, cluster)
    return Explanation(
        job=request.job,
        state="waiting",
        reason=reason,
        words=describe_reason(reason, request, scheduling_round, leaving),
        position=position,
        of=len(snapshot.pending),
        share=share,
        would_start=starting_changes(trials, reason, scheduling_round),
        expected_start=expected_start(snapshot, request.job),
    )


def on_burst(placements: Iterable[Placement], snapshot: Snapshot) -> str:
    """Return that a job is on burst capacity, and why; empty if it is not."""
    names = {placed.node for placed in placements}
    found = next((node for node in snapshot.nodes if node.burst and node.name in names), None)
    return "" if found is None else f", burst capacity of {found.cluster}: the others could not take it"


def share_of(request: Request, scheduling_round: SchedulingRound) -> float | None:
    """Return the fair-share score of its queue at the beginning of the round."""
    branch = scheduling_round.quota_tree.all.get(request.queue)
    return None if branch is None else branch.score
