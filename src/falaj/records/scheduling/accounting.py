"""Queues as an administrator sets them, budgets, and what jobs have used."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from falaj.records.names import Name, ObjectId
from falaj.records.record import Record
from falaj.records.scheduling.snapshot import Count, Quota, Request

Weight = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)]
Spending = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Period = Literal["month", "week", "none"]
"""The period of a budget: a calendar month or a week from Monday, in UTC; or none: from when it was set."""
By = Literal["job", "user", "workspace", "queue"]


class ResourceUsage(Record):
    """The resources that an attempt has used; none where they could not be measured."""

    cpu_s: float | None = None
    peak_memory_bytes: int | None = None
    cpu_energy_j: float | None = None
    gpu_energy_j: float | None = None


# ---------------------------------------------------------------------------------------------- queues


class QueueSettings(Record):
    """A queue as it was set; `workspaces` may submit into it, all if there are none. Each change is a new `version`."""

    name: Name
    quota: Quota = Quota()
    limit: Quota | None = None
    parent: Name | None = None
    weight: Weight = 1.0
    workspaces: tuple[str, ...] = ()
    version: int = 0


class Amounts(Record):
    """A sum of what jobs hold; a part of a GPU counts as a part."""

    cpus: Count = 0
    gpus: float = 0.0
    memory_bytes: Count = 0


class QueueState(Record):
    """A queue, and how it stands. What is held, runs and waits is counted with the queues below it.

    `borrowed` is what it holds beyond its quota. `share` is what it holds of the whole, by the resource that it has
    most of; `history` is the same over the time past, the longer ago the less. The lowest `score`, both by weight, goes
    first. Of the workspaces that may submit into it, `unseen` ones are not named to you.
    """

    settings: QueueSettings
    held: Amounts = Amounts()
    borrowed: Amounts = Amounts()
    running: int = 0
    waiting: int = 0
    share: float = 0.0
    history: float = 0.0
    score: float = 0.0
    unseen: int = 0
    children: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.settings.name


class QueueChange(Record):
    """A queue as it is now, none if it was removed; and as it was `before`, none if it was not there."""

    queue: QueueSettings | None
    before: QueueSettings | None = None


# --------------------------------------------------------------------------------------------- budgets


class BudgetTerms(Record):
    """The amount that a workspace may spend in each period; none: no bound."""

    workspace: str
    gpu_hours: float | None = None
    money: float | None = None
    period: Period = "month"


class BudgetState(Record):
    """A budget, and what was used of it since the period began; what is `left` below zero is overspent."""

    terms: BudgetTerms
    currency: str | None = None
    since: datetime
    until: datetime | None = None
    used_gpu_hours: float = 0.0
    used_money: float = 0.0
    left_gpu_hours: float | None = None
    left_money: float | None = None


class BudgetChange(Record):
    """A budget as it is now, none if it was taken away; and as it was `before`."""

    budget: BudgetState | None
    before: BudgetTerms | None = None


# ----------------------------------------------------------------------------------------------- usage


class UsageRow(Record):
    """The usage of one job, user, workspace or queue.

    Hours are those for which resources were held, whether or not they were busy. `energy_kwh` is what was measured,
    none if nothing was; the hours of attempts whose energy is not known, or not known yet, are told beside it. `costs`
    are by currency, at the prices of the time; empty where none were set.
    """

    id: str
    name: str
    workspace: str | None = None
    attempts: int = 0
    running: int = 0
    gpu_hours: float = 0.0
    cpu_hours: float = 0.0
    energy_kwh: float | None = None
    unmeasured_gpu_hours: float = 0.0
    unmeasured_cpu_hours: float = 0.0
    costs: dict[str, float] = {}


class UsageReport(Record):
    """The usage between two moments, the most expensive first; `left_out` rows are not shown, but in `total`."""

    by: By
    since: datetime
    until: datetime
    lines: tuple[UsageRow, ...] = ()
    total: UsageRow
    left_out: int = 0


class PastAttempt(Record):
    """An attempt as a replay needs it: what was asked, when, and how long it ran."""

    job: ObjectId
    attempt: int
    request: Request
    gpu_models: tuple[str, ...] = ()
    submitted_at: datetime
    started_at: datetime
    ended_at: datetime | None = None
    verdict: str | None = None
    borrows: bool = False
