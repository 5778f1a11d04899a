"""Decides when an attempt gets SIGTERM, gets SIGKILL, and has its sandbox killed. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StopCause = Literal["stopped", "timeout", "hung", "fault", "fenced"]
StopAction = Literal["term", "kill", "tear down"]

TEARDOWN_DELAY_S = 2.0
"""How long the init process may take to kill the ranks before the whole sandbox is killed."""


@dataclass
class Termination:
    """The end of one attempt. `timeout_at` and every `now` are readings of one monotonic clock."""

    timeout_at: float | None
    grace_s: float
    cause: StopCause | None = None
    why: str | None = None
    kill_at: float | None = None

    def request(self, cause: StopCause, *, grace_s: float, now: float, why: str | None = None) -> None:
        """Request the end. The first request sets the cause; a later one can only bring the end forward."""
        if self.cause is None:
            self.cause, self.why = cause, why
        kill_at = now + grace_s
        self.kill_at = kill_at if self.kill_at is None else min(self.kill_at, kill_at)

    def due(self, now: float) -> StopAction | None:
        """Return the action that is due by `now`; none if there is none."""
        if self.timeout_at is not None and now >= self.timeout_at:
            self.timeout_at = None
            self.request("timeout", grace_s=self.grace_s, now=now)
        if self.kill_at is None:
            return None
        if now >= self.kill_at + TEARDOWN_DELAY_S:
            return "tear down"
        return "kill" if now >= self.kill_at else "term"
