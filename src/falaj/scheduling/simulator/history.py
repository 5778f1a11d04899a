"""The jobs of the past, as the accounts have them, replayed in the world of today and in a changed one."""

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

LOOKS_BACK = timedelta(days=7)
MOST_JOBS = 100_000
"""In one replay; so many take hours on a large cluster, and about 1 GiB of memory. `what_if` itself has no bound."""
PREEMPTED = "preempted"
NOT_REPLAYED = (
    "jobs that were submitted earlier and those that never started are not replayed, and the history of queues begins "
    "at nothing; a job lasts as long as its attempts did together, one that still runs as long as so far"
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
    """What is asked, with the world as it is now: what came of it does not hang on when it is worked out.

    All that is wrong with it is said here.
    """
    until = now if until is None else until
    since = until - LOOKS_BACK if since is None else since
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
    """What these jobs would have met."""
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
    """One for each job of which there are attempts; those of one job follow each other."""
    return [_past_job(list(group), now) for _, group in groupby(attempts, key=lambda each: each.job)]


def _past_job(attempts: Sequence[PastAttempt], now: datetime) -> PastJob:
    """A clock that went back makes no time."""
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
            f"no job that was submitted from {since:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M %Z} has started"
        )
    if jobs > MOST_JOBS:
        raise InvalidInput.at(
            "since",
            given=f"{since.isoformat()}: {jobs} jobs",
            allowed=f"a time in which at most {MOST_JOBS} jobs were submitted",
            fix="a shorter time: a later since, or an earlier until",
        )
