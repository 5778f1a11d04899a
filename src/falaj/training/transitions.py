"""What becomes of a job when an attempt at it is over."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

from falaj.records.tracking import Outcome
from falaj.records.training.jobs import JobState, Verdict

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0

RUN_STATUS: dict[JobState, Outcome] = {
    JobState.DONE: "finished",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "killed",
}


class JobTransition(NamedTuple):
    """The state of the job from now on; `pause` is how long it waits before it is tried again."""

    state: JobState
    reason: str | None
    failures: int
    pause: timedelta | None = None


def next_state(row: Any, verdict: Verdict, reason: str | None) -> JobTransition:
    """Whether the job of `row` has ended, or goes back to the queue."""
    failures = row["failures"] + (verdict == "failed")
    if verdict == "done":
        return JobTransition(JobState.DONE, reason, failures)
    if verdict == "cancelled" or row["cancelling"]:
        return JobTransition(JobState.CANCELLED, reason or "cancelled", failures)
    if verdict in ("interrupted", "preempted", "moved"):
        return JobTransition(JobState.QUEUED, reason or verdict, failures)
    if failures > row["spec"]["retries"]:
        return JobTransition(JobState.FAILED, reason, failures)
    seconds = min(FIRST_PAUSE_S * 2 ** (failures - 1), LONGEST_PAUSE_S)
    left = row["spec"]["retries"] - failures
    words = f"attempt {row['attempt']} failed, it is tried again ({left} more after that): {reason}"
    return JobTransition(JobState.QUEUED, words, failures, timedelta(seconds=seconds))
