"""Budgets of workspaces: what is used and left in the current period."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple

from falaj.ports.metadata import Transaction
from falaj.records.names import ObjectId
from falaj.records.scheduling.accounting import BudgetState, BudgetTerms
from falaj.records.scheduling.snapshot import Budget
from falaj.scheduling import store
from falaj.scheduling.accounting import attempts, reports
from falaj.scheduling.accounting.periods import period_at


class BudgetSpending(NamedTuple):
    """A budget, its current period, and what was used of it."""

    budget: store.StoredBudget
    since: datetime
    until: datetime | None
    gpu_hours: float
    money: float

    def left(self) -> Budget:
        """Return what is left; negative if overspent."""
        given = self.budget
        return Budget(
            workspace=given.workspace,
            gpu_hours=None if given.gpu_hours is None else given.gpu_hours - self.gpu_hours,
            money=None if given.money is None else given.money - self.money,
        )


def spent(
    tx: Transaction, budgets: Iterable[store.StoredBudget], *, now: datetime, currency: str | None
) -> list[BudgetSpending]:
    """Return the spending of each budget, with running attempts. Money counts only in the current currency."""
    known = list(budgets)
    running: defaultdict[str, list[Any]] = defaultdict(list)
    for row in attempts.running_rows(tx) if known else ():
        running[row["workspace"]].append(row)
    return [_spent(tx, each, running[each.workspace], now=now, currency=currency) for each in known]


def count_ended(tx: Transaction, row: Any, *, now: datetime, currency: str | None) -> None:
    """Charge an attempt that ends now to the budget of its workspace; `row` has its end already."""
    budget = store.budget_of(tx, row["workspace"])
    if budget is None:
        return
    since, _ = period_at(budget.period, now, since=budget.since)
    counted = _fitting(budget, since, currency)
    if counted is None:
        counted = _recount(tx, budget.workspace, since, currency)
    else:
        part = reports.part_of(row, since=since, until=now, now=now)
        money = counted.money + part.costs.get(currency or "", 0.0)
        counted = counted._replace(gpu_hours=counted.gpu_hours + part.gpu_hours, money=money)
    store.count_budget(tx, budget.workspace, counted)


def _recount(
    tx: Transaction, workspace: ObjectId, since: datetime, currency: str | None
) -> store.BudgetCount:
    """Return the total usage of the ended attempts of a workspace since a moment."""
    used = reports.ended_since(tx, workspace, since)
    return store.BudgetCount(since, currency, used.gpu_hours, used.costs.get(currency or "", 0.0))


def _spent(
    tx: Transaction, budget: store.StoredBudget, running: list[Any], *, now: datetime, currency: str | None
) -> BudgetSpending:
    since, until = period_at(budget.period, now, since=budget.since)
    ended = _fitting(budget, since, currency) or _recount(tx, budget.workspace, since, currency)
    parts = [reports.part_of(row, since=since, until=now, now=now) for row in running]
    gpu_hours = ended.gpu_hours + sum(part.gpu_hours for part in parts)
    money = ended.money + sum(part.costs.get(currency or "", 0.0) for part in parts)
    return BudgetSpending(budget, since, until, gpu_hours, money)


def _fitting(budget: store.StoredBudget, since: datetime, currency: str | None) -> store.BudgetCount | None:
    """Return the stored count if it is of this period and currency."""
    counted = budget.counted
    fits = counted is not None and counted.since == since and counted.currency == currency
    return counted if fits else None


def terms(tx: Transaction, budget: store.StoredBudget) -> BudgetTerms:
    name = store.names_of(tx, [budget.workspace])[budget.workspace]
    return BudgetTerms(workspace=name, gpu_hours=budget.gpu_hours, money=budget.money, period=budget.period)


def state(tx: Transaction, each: BudgetSpending, *, currency: str | None) -> BudgetState:
    left = each.left()
    return BudgetState(
        terms=terms(tx, each.budget),
        currency=currency,
        since=each.since,
        until=each.until,
        used_gpu_hours=each.gpu_hours,
        used_money=each.money,
        left_gpu_hours=left.gpu_hours,
        left_money=left.money,
    )
