"""What workspaces have left to spend during a scheduling round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from math import fsum

from falaj.records.scheduling.snapshot import Budget, Placement, Price, Request, RunningJob
from falaj.scheduling.capacity.cluster import Cluster
from falaj.scheduling.capacity.resources import requested_amount

HOUR = timedelta(hours=1)
JobCost = tuple[float, float]


class BudgetLedger:
    """GPU-hours and money left to each workspace after its running jobs have reached their time limits.

    A job without a time limit is charged nothing in advance, and starts while anything is left.
    """

    def __init__(
        self,
        budgets: Iterable[Budget],
        price: Price,
        cluster: Cluster,
        running: Sequence[RunningJob],
        now: datetime,
    ) -> None:
        self.budgets = {budget.workspace: budget for budget in budgets}
        self.price = price
        self._models = {gpu.id: gpu.model for node in cluster.nodes for gpu in node.gpus} if budgets else {}
        self._spent: dict[str, JobCost] = {}
        due: dict[str, list[JobCost]] = {}
        for job in running if self.budgets else ():
            workspace = job.request.workspace
            if workspace is not None and workspace in self.budgets and job.ends_by is not None:
                rest = max(job.ends_by - now, timedelta(0))
                due.setdefault(workspace, []).append(self._cost(job.request, rest, job.placements))
        for owner, costs in due.items():
            self._spent[owner] = fsum(cost[0] for cost in costs), fsum(cost[1] for cost in costs)

    def can_afford(self, request: Request) -> bool:
        if request.workspace not in self.budgets:
            return True
        hours, money = self.left(request)
        gpu_hours, cost = self.cost(request)
        if hours is not None and request.each.gpus and (hours <= 0 or gpu_hours > hours):
            return False
        return money is None or (money > 0 and cost <= money)

    def left(self, request: Request) -> tuple[float | None, float | None]:
        """Return the GPU-hours and money left; None where there is no bound."""
        budget = self.budgets.get(request.workspace) if request.workspace else None
        if budget is None:
            return None, None
        hours, money = self._spent.get(budget.workspace, (0.0, 0.0))
        return (
            None if budget.gpu_hours is None else budget.gpu_hours - hours,
            None if budget.money is None else budget.money - money,
        )

    def spend(self, request: Request) -> None:
        """Charge a job that starts now or is nominated."""
        if request.workspace in self.budgets:
            hours, money = self._spent.get(request.workspace, (0.0, 0.0))
            more_hours, more_money = self.cost(request)
            self._spent[request.workspace] = hours + more_hours, money + more_money

    def cost(self, request: Request) -> JobCost:
        """Return the cost up to its time limit, on the most expensive GPUs that it may get."""
        return self._cost(request, request.time_limit or timedelta(0), ())

    def _cost(self, request: Request, lasts: timedelta, placements: Sequence[Placement]) -> JobCost:
        amount, hours = requested_amount(request), lasts / HOUR
        gpus = amount.gpus
        money = amount.cpus * self.price.cpu
        if gpus:
            money += gpus * self._gpu_price(request, placements)
        return gpus * hours, money * hours

    def _gpu_price(self, request: Request, placements: Sequence[Placement]) -> float:
        """Return the mean price of its GPUs, or the highest price of those that it may get."""
        found = [self._price(self._models.get(gpu)) for each in placements for gpu in each.gpus]
        if found:
            return fsum(found) / len(found)
        known = set(self._models.values())
        models = known if request.each.gpu_models is None else known & request.each.gpu_models
        return max((self._price(model) for model in models), default=self.price.gpu)

    def _price(self, model: str | None) -> float:
        return self.price.gpus.get(model or "", self.price.gpu)
