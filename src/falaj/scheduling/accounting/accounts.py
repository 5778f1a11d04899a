"""The accounts that the jobs service updates: queues and budgets with their state, and the usage of attempts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from falaj.errors import Denied, Fault, NotFound
from falaj.governance import objects
from falaj.ports.metadata import Transaction
from falaj.records.config import Prices
from falaj.records.names import ObjectId
from falaj.records.scheduling.accounting import ResourceUsage
from falaj.records.scheduling.snapshot import Budget, Node, Placement, Price, Queue, Request
from falaj.scheduling import cordons, store
from falaj.scheduling.accounting import attempts, budgets, history
from falaj.scheduling.accounting.charges import (
    HourlyRates,
    bill_for,
    hours,
    price_of,
    rates_of,
)
from falaj.scheduling.accounting.decayed_usage import (
    ResourceAverages,
    UsageSpan,
    averaged,
    cluster_total,
)
from falaj.scheduling.capacity.resources import ResourceAmount, dominant_share, requested_amount
from falaj.scheduling.queue_tree import summed

DEFAULT = "default"


class QueueAccounts:
    """Reads queues and budgets, and records attempts, in the transaction of the caller."""

    def __init__(
        self, *, nodes: Callable[[], tuple[Node, ...]], prices: Prices | None, half_life: timedelta
    ) -> None:
        self._nodes = nodes
        self._prices = prices
        self._half_life = half_life
        self._shelf = store.QueueCache()

    @property
    def price(self) -> Price:
        return price_of(self._prices)

    @property
    def half_life(self) -> timedelta:
        return self._half_life

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes of the cluster."""
        return self._nodes()

    def with_cordons(self, tx: Transaction, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """Return the nodes, with those marked that start no further jobs."""
        return cordons.with_cordons(tx, nodes)

    @property
    def currency(self) -> str | None:
        return None if self._prices is None else self._prices.currency

    def queues(self, tx: Transaction, *, now: datetime) -> tuple[Queue, ...]:
        """Return every queue with its history; `default` always exists."""
        found = {name: each.queue for name, each in self._shelf.queues(tx).items()}
        found.setdefault(DEFAULT, Queue(name=DEFAULT))
        past = self.histories(tx, found, now=now)
        return tuple(
            queue.model_copy(update={"history": past[name]}) if past[name] else queue
            for name, queue in found.items()
        )

    def histories(self, tx: Transaction, queues: dict[str, Queue], *, now: datetime) -> dict[str, float]:
        """Return the decayed dominant share of each queue with all below it."""
        own = history.ended_averages(tx, now=now, half_life=self._half_life)
        for queue, span in attempts.running_spans(tx):
            lately = averaged([span], now=now, half_life=self._half_life)
            own[queue] = own.get(queue, ResourceAverages()).plus(lately)
        whole = self.whole()
        total = summed(own, queues, zero=ResourceAverages(), plus=ResourceAverages.plus)
        return {name: dominant_share(held, whole) for name, held in total.items()}

    def whole(self) -> ResourceAverages:
        """Return the total capacity of the cluster."""
        return cluster_total(self._nodes())

    def budgets(self, tx: Transaction, *, now: datetime) -> tuple[Budget, ...]:
        """Return what is left of the budget of each workspace that has one."""
        found = budgets.spent(tx, store.all_budgets(tx), now=now, currency=self.currency)
        return tuple(each.left() for each in found)

    def require_open(self, tx: Transaction, queue: str, workspace: ObjectId) -> None:
        """Raise NotFound or Denied if the workspace may not submit into the queue."""
        found = store.all_queues(tx)
        if queue not in found and queue != DEFAULT:
            open_ones = [
                name for name, each in found.items() if not each.workspaces or workspace in each.workspaces
            ]
            available = ", ".join(sorted(open_ones))
            fault = Fault(
                where="spec.queue",
                given=queue,
                allowed=f"a queue: {available}",
                fix=f"one of these, or let an operator create it: falaj queues set {queue}",
            )
            raise NotFound(
                f"queue {queue!r} does not exist; the queues are: {available}",
                faults=[fault],
                details={"kind": "queue", "reference": queue},
            )
        allowed = found[queue].workspaces if queue in found else ()
        if allowed and workspace not in allowed:
            name = objects.name_of(tx, workspace)
            raise Denied(
                f"workspace {name} may not submit into queue {queue}; an operator of the "
                f"platform can allow it: falaj queues set {queue} --workspace NAME"
            )

    def begin(
        self,
        tx: Transaction,
        request: Request,
        *,
        attempt: int,
        user: ObjectId,
        placements: Sequence[Placement],
        gpu_models: tuple[str, ...],
        borrows: bool,
        now: datetime,
    ) -> None:
        """Record the start of an attempt, at the current prices."""
        held = requested_amount(request)
        rates = rates_of(held, gpu_models, self._price_at(placements), self.currency)
        attempts.add_attempt(
            tx,
            {
                "job": request.job,
                "attempt": attempt,
                "workspace": request.workspace or _workspace_of(tx, request.job),
                "user_id": user,
                "queue": request.queue,
                "request": request.model_dump(mode="json"),
                "placements": [each.model_dump(mode="json") for each in placements],
                "gpu_models": list(gpu_models),
                "borrows": borrows,
                "cpus": held.cpus,
                "gpus_milli": held.gpus_milli,
                "memory_bytes": held.memory,
                "currency": rates.currency,
                "cpu_rate": rates.cpu,
                "gpu_rate": rates.gpu,
                "submitted_at": request.submitted_at,
                "started_at": now,
            },
        )

    def _price_at(self, placements: Sequence[Placement]) -> Price:
        """Return the price of the cluster in which a job runs; that of the platform if it has none of its own."""
        names = {placed.node for placed in placements}
        found = (node.price for node in self._nodes() if node.name in names and node.price is not None)
        return next(found, self.price)

    def end(
        self,
        tx: Transaction,
        job: ObjectId,
        *,
        attempt: int,
        verdict: str,
        used: ResourceUsage,
        now: datetime,
    ) -> None:
        """Record the end and usage of an attempt; do nothing if it is unknown or has ended already."""
        row = attempts.open_attempt(tx, job, attempt)
        if row is None:
            return
        held = ResourceAmount(row["cpus"], row["gpus_milli"], row["memory_bytes"])
        if not held.gpus_milli:  # no GPU: there is no measurement of GPU energy
            used = used.model_copy(update={"gpu_energy_j": None})
        rates = HourlyRates(row["cpu_rate"], row["gpu_rate"], row["currency"])
        ended_at = max(now, row["started_at"])  # the clock may have gone back
        bill = bill_for(held, rates, used, hours(row["started_at"], ended_at), self._prices)
        values = {**used.model_dump(), **bill._asdict()}
        attempts.close_attempt(tx, job, attempt, ended_at=ended_at, verdict=verdict, **values)
        closed = {**row, **values, "ended_at": ended_at}
        budgets.count_ended(tx, closed, now=ended_at, currency=self.currency)
        span = UsageSpan(attempts.sums(*held), row["started_at"], ended_at)
        history.add_ended(tx, row["queue"], span, now=ended_at, half_life=self._half_life)


def _workspace_of(tx: Transaction, job: ObjectId) -> ObjectId:
    found = objects.ever(tx, job)
    if found is None:
        raise NotFound(f"job {job} does not exist")
    return found.workspace
