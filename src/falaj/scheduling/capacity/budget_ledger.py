"""What workspaces have left to spend during a scheduling round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from math import fsum

from falaj.records.scheduling.snapshot import Budget, Node, Placement, Price, Request, RunningJob
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
        self._nodes = {node.name: node for node in cluster.nodes} if self.budgets else {}
        self._models = {gpu.id: gpu.model for node in self._nodes.values() for gpu in node.gpus}
        self._offers = {
            burst: self._offered(node for node in self._nodes.values() if burst or not node.burst)
            for burst in (False, True)
        }
        self._spent: dict[str, JobCost] = {}
        due: dict[str, list[JobCost]] = {}
        for job in running if self.budgets else ():
            workspace = job.request.workspace
            if workspace is not None and workspace in self.budgets and job.ends_by is not None:
                rest = max(job.ends_by - now, timedelta(0))
                due.setdefault(workspace, []).append(self._cost(job.request, rest, job.placements))
        for owner, costs in due.items():
            self._spent[owner] = fsum(cost[0] for cost in costs), fsum(cost[1] for cost in costs)

    def can_afford(self, request: Request, *, burst: bool = False) -> bool:
        """Return whether the budget covers the job; with `burst` also at the prices of burst capacity."""
        if request.workspace not in self.budgets:
            return True
        hours, money = self.left(request)
        gpu_hours, cost = self.cost(request, burst=burst)
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

    def cost(self, request: Request, *, burst: bool = False) -> JobCost:
        """Return the cost up to its time limit, at the highest prices of what it may get."""
        cpu, gpus = self._offers[burst]
        models = request.each.gpu_models
        gpu = max(
            (price for model, price in gpus if models is None or model in models), default=self.price.gpu
        )
        return self._total(request, request.time_limit or timedelta(0), cpu, gpu)

    def _offered(self, nodes: Iterable[Node]) -> tuple[float, set[tuple[str, float]]]:
        """Return the highest price of a CPU of some nodes, and the prices of their GPUs by model."""
        found, cpus = set[tuple[str, float]](), set[float]()
        for node in nodes:
            price = node.price or self.price
            cpus.add(price.cpu)
            found |= {(gpu.model, _gpu_price(price, gpu.model)) for gpu in node.gpus}
        return max(cpus, default=self.price.cpu), found

    def _cost(self, request: Request, lasts: timedelta, placements: Sequence[Placement]) -> JobCost:
        """Return the cost of a job where it runs."""
        there = next((self._nodes[each.node] for each in placements if each.node in self._nodes), None)
        price = self.price if there is None or there.price is None else there.price
        gpus = [_gpu_price(price, self._models.get(gpu)) for each in placements for gpu in each.gpus]
        gpu = fsum(gpus) / len(gpus) if gpus else self._highest(request)
        return self._total(request, lasts, price.cpu, gpu)

    def _highest(self, request: Request) -> float:
        models = request.each.gpu_models
        prices = (price for model, price in self._offers[True][1] if models is None or model in models)
        return max(prices, default=self.price.gpu)

    def _total(self, request: Request, lasts: timedelta, cpu: float, gpu: float) -> JobCost:
        amount, hours = requested_amount(request), lasts / HOUR
        return amount.gpus * hours, (amount.cpus * cpu + amount.gpus * gpu) * hours


def _gpu_price(price: Price, model: str | None) -> float:
    return price.gpus.get(model or "", price.gpu)
