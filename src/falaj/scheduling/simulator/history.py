"""What-if questions about recorded jobs: build the question, and answer it by replaying the attempts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from itertools import groupby

from falaj.errors import InvalidInput, NotFound
from falaj.ports.metadata import Transaction
from falaj.records.scheduling.accounting import PastAttempt
from falaj.records.scheduling.simulation import (
    NO_TIME,
    Assumptions,
    Changes,
    PastJob,
    SimulatedCluster,
    WhatIfComparison,
    WhatIfQuestion,
)
from falaj.scheduling.accounting.accounts import QueueAccounts
from falaj.scheduling.accounting.attempts import count_past_jobs
from falaj.scheduling.simulator.changes import apply_changes
from falaj.scheduling.simulator.comparison import what_if
from falaj.scheduling.simulator.engine import Progress

DEFAULT_WINDOW = timedelta(days=7)
MOST_JOBS = 100_000
"""Per replay. So many take hours on a large cluster, and about 1 GiB of memory. `what_if` itself has no bound."""
PREEMPTED = "preempted"
NOT_REPLAYED = (
    "not replayed: jobs submitted earlier and jobs that never started; the usage history of queues starts empty; "
    "the duration of a job is the sum of its attempts, up to now for a running one"
)


def question_for(
    tx: Transaction,
    accounts: QueueAccounts,
    changes: Changes,
    *,
    since: datetime | None,
    until: datetime | None,
    checkpoint_every: timedelta,
    now: datetime,
) -> WhatIfQuestion:
    """Return the question with the world as it is now, so that the answer does not depend on when it is computed.

    Raise InvalidInput or NotFound if it cannot be answered.
    """
    until = now if until is None else until
    since = until - DEFAULT_WINDOW if since is None else since
    if since >= until:
        raise InvalidInput.at("since", given=since.isoformat(), allowed=f"before {until.isoformat()}")
    assume = Assumptions(half_life=accounts.half_life, checkpoint_every=checkpoint_every)
    queues = tuple(queue.model_copy(update={"history": 0.0}) for queue in accounts.queues(tx, now=now))
    world = SimulatedCluster(nodes=accounts.nodes(), queues=queues, price=accounts.price, assume=assume)
    apply_changes(world, changes)
    _require_some(count_past_jobs(tx, since=since, until=until, as_of=now), since=since, until=until)
    return WhatIfQuestion(world=world, changes=changes, since=since, until=until, asked_at=now)


def answer(
    question: WhatIfQuestion, attempts: Iterable[PastAttempt], *, progress: Progress | None = None
) -> WhatIfComparison:
    """Return the comparison of both replays of the jobs of `attempts`."""
    found = what_if(
        past_jobs(attempts, now=question.asked_at),
        question.world,
        question.changes,
        since=question.since,
        until=question.until,
        progress=progress,
    )
    return found.model_copy(update={"words": (*found.words, NOT_REPLAYED)})


def past_jobs(attempts: Iterable[PastAttempt], *, now: datetime) -> list[PastJob]:
    """Return one job for each run of attempts at it; the attempts of a job must be adjacent."""
    return [_past_job(list(group), now) for _, group in groupby(attempts, key=lambda each: each.job)]


def _past_job(attempts: Sequence[PastAttempt], now: datetime) -> PastJob:
    """Return the job of the attempts. Negative times, after a clock went back, count as zero."""
    lasted = [max((each.ended_at or now) - each.started_at, NO_TIME) for each in attempts]
    first = min(each.started_at for each in attempts)
    submitted_at = min(each.submitted_at for each in attempts)
    return PastJob(
        request=attempts[0].request.model_copy(update={"submitted_at": submitted_at, "claim": False}),
        duration=sum(lasted, NO_TIME),
        waited=max(first - submitted_at, NO_TIME),
        evictions=sum(each.verdict == PREEMPTED for each in attempts),
    )


def _require_some(jobs: int, *, since: datetime, until: datetime) -> None:
    if not jobs:
        raise NotFound(
            f"no job submitted from {since:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M %Z} has started"
        )
    if jobs > MOST_JOBS:
        raise InvalidInput.at(
            "since",
            given=f"{since.isoformat()}: {jobs} jobs",
            allowed=f"a time range in which at most {MOST_JOBS} jobs were submitted",
            fix="a shorter range: a later `since` or an earlier `until`",
        )
