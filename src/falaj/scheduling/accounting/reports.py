"""Usage totals of a time range: whole attempts are summed by the database, partial ones here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from falaj.ports.metadata import Transaction
from falaj.records.scheduling.accounting import By, UsageRow
from falaj.records.scheduling.snapshot import WHOLE_GPU
from falaj.scheduling.accounting import attempts
from falaj.scheduling.accounting.charges import hours, kwh

KEY_COLUMN = {"job": "job", "user": "user_id", "workspace": "workspace", "queue": "queue"}


@dataclass
class UsageTotals:
    """Accumulated usage."""

    workspace: str | None = None
    attempts: int = 0
    running: int = 0
    gpu_hours: float = 0.0
    cpu_hours: float = 0.0
    joules: float | None = None
    unmeasured_gpu_hours: float = 0.0
    unmeasured_cpu_hours: float = 0.0
    costs: dict[str, float] = field(default_factory=dict)

    def add_energy(self, *joules: float | None) -> None:
        known = [each for each in joules if each is not None]
        if known:
            self.joules = (self.joules or 0.0) + sum(known)

    def add_cost(self, currency: str | None, cost: float) -> None:
        if currency is not None:
            self.costs[currency] = self.costs.get(currency, 0.0) + cost

    def add(self, other: UsageTotals) -> None:
        self.attempts += other.attempts
        self.running += other.running
        self.gpu_hours += other.gpu_hours
        self.cpu_hours += other.cpu_hours
        self.unmeasured_gpu_hours += other.unmeasured_gpu_hours
        self.unmeasured_cpu_hours += other.unmeasured_cpu_hours
        self.add_energy(other.joules)
        for currency, cost in other.costs.items():
            self.add_cost(currency, cost)


def totals(
    tx: Transaction,
    by: By,
    *,
    since: datetime,
    until: datetime,
    now: datetime,
    workspaces: Sequence[str] | None,
) -> dict[str, UsageTotals]:
    """Return usage totals in the time range, grouped by `by`; running attempts count up to `now`."""
    found: dict[str, UsageTotals] = {}
    for row in attempts.totals_inside(tx, by, since=since, until=until, workspaces=workspaces):
        tally = found.setdefault(row["key"], UsageTotals(row["workspace"]))
        tally.add(_summed(row))
    for row in attempts.across(tx, since=since, until=until, workspaces=workspaces):
        tally = found.setdefault(row[KEY_COLUMN[by]], UsageTotals(row["workspace"]))
        tally.add(part_of(row, since=since, until=until, now=now))
    return found


def ended_since(tx: Transaction, workspace: str, since: datetime) -> UsageTotals:
    """Return the usage of the ended attempts of a workspace since a moment."""
    total = UsageTotals()
    forever = datetime.max.replace(tzinfo=UTC)
    for row in attempts.totals_inside(tx, "workspace", since=since, until=forever, workspaces=[workspace]):
        total.add(_summed(row))
    for row in attempts.ended_across(tx, workspace, since):
        total.add(part_of(row, since=since, until=forever, now=forever))
    return total


def part_of(row: Any, *, since: datetime, until: datetime, now: datetime) -> UsageTotals:
    """Return the usage of one attempt in the time range, with its energy spread evenly."""
    start, end = max(row["started_at"], since), min(row["ended_at"] or now, until)
    lasted, part = hours(row["started_at"], row["ended_at"] or now), hours(start, end)
    fraction = part / lasted if lasted else 1.0
    gpu_hours, cpu_hours = row["gpus_milli"] / WHOLE_GPU * part, row["cpus"] * part
    tally = UsageTotals(
        attempts=1,
        running=int(row["ended_at"] is None),
        gpu_hours=gpu_hours,
        cpu_hours=cpu_hours,
        unmeasured_gpu_hours=gpu_hours if row["gpu_energy_j"] is None else 0.0,
        unmeasured_cpu_hours=cpu_hours if row["cpu_energy_j"] is None else 0.0,
    )
    energies = (row["cpu_energy_j"], row["gpu_energy_j"])
    tally.add_energy(*(None if joules is None else joules * fraction for joules in energies))
    energy_cost = (row["energy_cost"] or 0.0) * fraction
    tally.add_cost(row["currency"], (row["cpu_rate"] + row["gpu_rate"]) * part + energy_cost)
    return tally


def line(ident: str, name: str, tally: UsageTotals, *, workspace: str | None) -> UsageRow:
    return UsageRow(
        id=ident,
        name=name,
        workspace=workspace,
        attempts=tally.attempts,
        running=tally.running,
        gpu_hours=tally.gpu_hours,
        cpu_hours=tally.cpu_hours,
        energy_kwh=None if tally.joules is None else kwh(tally.joules),
        unmeasured_gpu_hours=tally.unmeasured_gpu_hours,
        unmeasured_cpu_hours=tally.unmeasured_cpu_hours,
        costs=dict(sorted(tally.costs.items())),
    )


def most_first(found: Mapping[str, UsageTotals], currency: str | None) -> list[str]:
    """Return the keys sorted by cost, then by hours, the largest first, then by name."""

    def size(key: str) -> tuple[float, float, float, str]:
        tally = found[key]
        return -tally.costs.get(currency or "", 0.0), -tally.gpu_hours, -tally.cpu_hours, key

    return sorted(found, key=size)


def _summed(row: Any) -> UsageTotals:
    tally = UsageTotals(
        attempts=row["attempts"],
        gpu_hours=row["gpu_hours"],
        cpu_hours=row["cpu_hours"],
        unmeasured_gpu_hours=row["unmeasured_gpu_hours"],
        unmeasured_cpu_hours=row["unmeasured_cpu_hours"],
    )
    tally.add_energy(row["cpu_energy_j"], row["gpu_energy_j"])
    tally.add_cost(row["currency"], row["cost"])
    return tally
