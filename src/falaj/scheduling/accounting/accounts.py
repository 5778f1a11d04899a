"""The accounts that the room of jobs keeps up: queues and budgets as they stand, and what each attempt uses."""

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
from falaj.scheduling import store
from falaj.scheduling.accounting import attempts, budgets, history
from falaj.scheduling.accounting.charges import (
    ChargedResources,
    HourlyRates,
    bill_for,
    charged_resources,
    hours,
    price_of,
    rates_of,
)
from falaj.scheduling.accounting.decayed_usage import (
    ResourceAverages,
    UsageSpan,
    averaged,
    cluster_total,
    dominant_share,
)
from falaj.scheduling.queue_tree import summed

DEFAULT = "default"


class QueueAccounts:
    """What queues hold and have held, and what attempts cost; all of it in the transaction of the caller."""

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
        """The machines there are."""
        return self._nodes()

    @property
    def currency(self) -> str | None:
        return None if self._prices is None else self._prices.currency

    def queues(self, tx: Transaction, *, now: datetime) -> tuple[Queue, ...]:
        """Every queue with its history; `default` is always there."""
        found = {name: each.queue for name, each in self._shelf.queues(tx).items()}
        found.setdefault(DEFAULT, Queue(name=DEFAULT))
        past = self.histories(tx, found, now=now)
        return tuple(
            queue.model_copy(update={"history": past[name]}) if past[name] else queue
            for name, queue in found.items()
        )

    def histories(self, tx: Transaction, queues: dict[str, Queue], *, now: datetime) -> dict[str, float]:
        """The share of the whole that each queue has held lately, with those below it."""
        own = history.ended_averages(tx, now=now, half_life=self._half_life)
        for queue, stretch in attempts.running_spans(tx):
            lately = averaged([stretch], now=now, half_life=self._half_life)
            own[queue] = own.get(queue, ResourceAverages()).plus(lately)
        whole = self.whole()
        total = summed(own, queues, zero=ResourceAverages(), plus=ResourceAverages.plus)
        return {name: dominant_share(held, whole) for name, held in total.items()}

    def whole(self) -> ResourceAverages:
        """All that the machines have."""
        return cluster_total(self._nodes())

    def budgets(self, tx: Transaction, *, now: datetime) -> tuple[Budget, ...]:
        """What is left to each workspace that has a budget."""
        found = budgets.spent(tx, store.all_budgets(tx), now=now, currency=self.currency)
        return tuple(each.left() for each in found)

    def require_open(self, tx: Transaction, queue: str, workspace: ObjectId) -> None:
        """NotFound, or Denied, where a workspace may not submit into a queue."""
        found = store.all_queues(tx)
        if queue not in found and queue != DEFAULT:
            open_ones = [
                name for name, each in found.items() if not each.workspaces or workspace in each.workspaces
            ]
            there = ", ".join(sorted(open_ones))
            fault = Fault(
                where="spec.queue",
                given=queue,
                allowed=f"a queue: {there}",
                fix=f"one of these, or an operator makes it: falaj queues set {queue}",
            )
            raise NotFound(
                f"there is no queue {queue!r}; there is {there}",
                faults=[fault],
                details={"kind": "queue", "reference": queue},
            )
        allowed = found[queue].workspaces if queue in found else ()
        if allowed and workspace not in allowed:
            home = objects.ever(tx, workspace)
            raise Denied(
                f"workspace {home.name if home else workspace} may not submit into queue {queue}; an operator of the "
                f"platform can let it: falaj queues set {queue} --workspace NAME"
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
        """Write down that an attempt begins, at the prices of today."""
        held = charged_resources(request)
        rates = rates_of(held, gpu_models, self._prices)
        attempts.add_attempt(
            tx,
            {
                "job": request.job,
                "attempt": attempt,
                "workspace": request.workspace or _home_of(tx, request.job),
                "user_id": user,
                "queue": request.queue,
                "request": request.model_dump(mode="json"),
                "placements": [each.model_dump(mode="json") for each in placements],
                "gpu_models": list(gpu_models),
                "borrows": borrows,
                **held._asdict(),
                "currency": rates.currency,
                "cpu_rate": rates.cpu,
                "gpu_rate": rates.gpu,
                "submitted_at": request.submitted_at,
                "started_at": now,
            },
        )

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
        """Write down what an attempt used; nothing for one that began before there were accounts, or has ended."""
        row = attempts.open_attempt(tx, job, attempt)
        if row is None:
            return
        held = ChargedResources(row["cpus"], row["gpus_milli"], row["memory_bytes"])
        if not held.gpus_milli:  # that it used no energy of GPUs is not a measurement
            used = used.model_copy(update={"gpu_energy_j": None})
        rates = HourlyRates(row["cpu_rate"], row["gpu_rate"], row["currency"])
        ended_at = max(now, row["started_at"])  # the clock may have gone back
        bill = bill_for(held, rates, used, hours(row["started_at"], ended_at), self._prices)
        values = {**used.model_dump(), **bill._asdict()}
        attempts.close_attempt(tx, job, attempt, ended_at=ended_at, verdict=verdict, **values)
        closed = {**row, **values, "ended_at": ended_at}
        budgets.count_ended(tx, closed, now=ended_at, currency=self.currency)
        stretch = UsageSpan(attempts.sums(*held), row["started_at"], ended_at)
        history.add_ended(tx, row["queue"], stretch, now=ended_at, half_life=self._half_life)


def _home_of(tx: Transaction, job: ObjectId) -> ObjectId:
    found = objects.ever(tx, job)
    if found is None:
        raise NotFound(f"there is no job {job}")
    return found.workspace
