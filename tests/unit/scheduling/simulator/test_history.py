"""Recorded attempts become jobs that can be replayed."""

from __future__ import annotations

from datetime import datetime

from falaj.records.scheduling.accounting import PastAttempt
from falaj.scheduling.simulator.history import past_jobs
from simulator_fixtures import at, minutes, past


def attempt(
    job: str, number: int, began: float, ended: float | None, verdict: str | None = "done"
) -> PastAttempt:
    request = past(job, 0, 0).request
    over: datetime | None = None if ended is None else at(ended)
    return PastAttempt(
        job=request.job,
        attempt=number,
        request=request.model_copy(update={"claim": True}),
        submitted_at=at(0),
        started_at=at(began),
        ended_at=over,
        verdict=verdict,
    )


def test_a_job_lasts_as_long_as_its_attempts_together_and_waited_until_the_first() -> None:
    attempts = [attempt("a", 1, 10, 30, "preempted"), attempt("a", 2, 50, 60), attempt("b", 1, 5, 6)]

    a, b = past_jobs(attempts, now=at(100))

    assert (a.request.job, a.duration, a.waited, a.evictions) == ("a", minutes(30), minutes(10), 1)
    assert (b.request.job, b.duration, b.waited, b.evictions) == ("b", minutes(1), minutes(5), 0)
    assert not a.request.claim


def test_a_job_that_still_runs_has_lasted_until_now() -> None:
    (job,) = past_jobs([attempt("a", 1, 10, None, None)], now=at(100))

    assert job.duration == minutes(90)


def test_a_clock_that_went_back_gives_no_negative_duration() -> None:
    (job,) = past_jobs([attempt("a", 1, -5, -10)], now=at(100))

    assert (job.duration, job.waited) == (minutes(0), minutes(0))
