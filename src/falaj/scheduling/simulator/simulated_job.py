"""One job in the simulator: its remaining work, state and usage."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

from falaj.records.scheduling.simulation import NO_TIME, JobOutcome, PastJob
from falaj.records.scheduling.snapshot import Reason, Request, RunningJob
from falaj.scheduling.capacity.resources import ResourceAmount, requested_amount

HOUR = timedelta(hours=1)


class BudgetUse(NamedTuple):
    """GPU-hours and money that count against a budget."""

    gpu_hours: float = 0.0
    money: float = 0.0

    def plus(self, other: BudgetUse) -> BudgetUse:
        return BudgetUse(self.gpu_hours + other.gpu_hours, self.money + other.money)


@dataclass(eq=False)
class SimulatedJob:
    """`turn` is incremented when the job starts or stops, so that events of earlier turns are recognised."""

    past: PastJob
    request: Request = field(init=False)
    amount: ResourceAmount = field(init=False)
    left: timedelta = field(init=False)
    turn: int = 0
    running: RunningJob | None = None
    price_an_hour: float = 0.0
    reason: Reason | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    end: Literal["done", "timed-out", "waiting"] = "waiting"
    computed: timedelta = NO_TIME
    ran: timedelta = NO_TIME
    lost: timedelta = NO_TIME
    evicted: int = 0
    displaced: int = 0
    gpu_hours: float = 0.0
    cpu_hours: float = 0.0
    cost: float = 0.0

    def __post_init__(self) -> None:
        self.request = self.past.request.model_copy(update={"claim": False})
        self.amount = requested_amount(self.request)
        self.left = self.past.duration

    def start(self, running: RunningJob, price_an_hour: float) -> timedelta:
        """Begin an attempt; return how long it lasts without preemption."""
        self.turn += 1
        self.running, self.price_an_hour, self.reason = running, price_an_hour, None
        self.request = running.request
        self.started_at = self.started_at or running.started_at
        limit = self.request.time_limit
        return self.left if limit is None else min(self.left, limit)

    def stop(self, now: datetime, *, checkpoint_every: timedelta) -> None:
        """Stop computing, and keep the work up to the last checkpoint."""
        self.turn += 1
        since = self._since_start(now)
        kept = since - since % checkpoint_every if checkpoint_every else since
        self._compute(kept)
        self.lost += since - kept

    def finish(self, now: datetime) -> None:
        self._compute(self._since_start(now))
        self.ended_at = now
        self.end = "timed-out" if self.left else "done"

    def release(self, now: datetime) -> BudgetUse:
        """Release the resources; return what the attempt has used."""
        used = self.used_since_start(now)
        self.ran += self._since_start(now)
        self.gpu_hours += used.gpu_hours
        self.cpu_hours += self.amount.cpus * (self._since_start(now) / HOUR)
        self.cost += used.money
        self.running = None
        return used

    def used_since_start(self, now: datetime) -> BudgetUse:
        hours = self._since_start(now) / HOUR
        return BudgetUse(self.amount.gpus * hours, self.price_an_hour * hours)

    def outcome(self) -> JobOutcome:
        request = self.past.request
        waited = None if self.started_at is None else self.started_at - request.submitted_at
        return JobOutcome(
            job=request.job,
            queue=request.queue,
            submitted_at=request.submitted_at,
            started_at=self.started_at,
            ended_at=self.ended_at,
            end=self.end,
            wait=waited,
            ran=self.ran,
            evicted=self.evicted,
            displaced=self.displaced,
            lost=self.lost,
            gpu_hours=self.gpu_hours,
            cpu_hours=self.cpu_hours,
            cost=self.cost,
            reason=self.reason if self.end == "waiting" else None,
        )

    def _compute(self, span: timedelta) -> None:
        self.left -= span
        self.computed += span

    def _since_start(self, now: datetime) -> timedelta:
        if self.running is None:
            raise ValueError(f"job {self.request.job} is not running")
        return now - self.running.started_at
