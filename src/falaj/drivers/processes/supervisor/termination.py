"""Decides by the clock when an attempt is asked to end, killed, and torn down. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StopCause = Literal["stopped", "timeout", "hung", "fault"]
StopAction = Literal["term", "kill", "tear down"]

TEARDOWN_DELAY_S = 2.0
"""How long the first process inside may take to kill the ranks before the whole sandbox is killed."""


@dataclass
class Termination:
    """`timeout_at` and every `now` are readings of one monotonic clock."""

    timeout_at: float | None
    grace_s: float
    cause: StopCause | None = None
    why: str | None = None
    kill_at: float | None = None

    def request(self, cause: StopCause, *, grace_s: float, now: float, why: str | None = None) -> None:
        """A later request may only bring the end nearer; the first one is its cause."""
        if self.cause is None:
            self.cause, self.why = cause, why
        kill_at = now + grace_s
        self.kill_at = kill_at if self.kill_at is None else min(self.kill_at, kill_at)

    def due(self, now: float) -> StopAction | None:
        """What has to be done by `now`; none: let it run."""
        if self.timeout_at is not None and now >= self.timeout_at:
            self.timeout_at = None
            self.request("timeout", grace_s=self.grace_s, now=now)
        if self.kill_at is None:
            return None
        if now >= self.kill_at + TEARDOWN_DELAY_S:
            return "tear down"
        return "kill" if now >= self.kill_at else "term"
