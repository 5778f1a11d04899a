"""Usage during a simulation: resources held and wanted, usage history of queues, and budgets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

from falaj.records.scheduling.simulation import SimulatedCluster
from falaj.records.scheduling.snapshot import Budget, Node, Queue
from falaj.scheduling.capacity.cluster import Cluster
from falaj.scheduling.capacity.resources import NOTHING, ResourceAmount, dominant_share
from falaj.scheduling.queue_tree import ancestry
from falaj.scheduling.simulator.fair_shares import FairShareTracker
from falaj.scheduling.simulator.policies import PERMANENT_REASONS
from falaj.scheduling.simulator.simulated_job import HOUR, BudgetUse, SimulatedJob

NO_AVERAGES = (0.0, 0.0, 0.0)


class DecayedShare(NamedTuple):
    """The exponentially decayed mean usage of a queue, and what is left of its initial history."""

    initial: float
    averages: tuple[float, ...]

    def share_of(self, whole: ResourceAmount) -> float:
        return self.initial + dominant_share(self.averages, whole)


class UsageMeter:
    """Accumulates usage as the virtual clock advances."""

    def __init__(self, world: SimulatedCluster, begin: datetime) -> None:
        self.world, self.begin, self.now, self.last_end = world, begin, begin, begin
        self.whole = Cluster(world.nodes).whole
        self.gpu_hours_there = self.cpu_hours_there = 0.0
        self._until_last_end = (0.0, 0.0)
        self._queues = {queue.name: queue for queue in world.queues}
        self._above = {name: tuple(ancestry(name, self._queues)) for name in self._queues}
        self._held: dict[str, ResourceAmount] = defaultdict(ResourceAmount)  # with what is below
        self._past = {queue.name: DecayedShare(queue.history, NO_AVERAGES) for queue in world.queues}
        self._spent: dict[str, BudgetUse] = defaultdict(BudgetUse)  # by attempts that are over
        self.dues = FairShareTracker(world.queues)

    @property
    def there(self) -> tuple[float, float]:
        """Return the available GPU-hours and CPU-hours up to the last end of a job."""
        return self._until_last_end

    def advance(self, to: datetime) -> None:
        span = to - self.now
        self.now = to
        if not span:
            return
        hours = span / HOUR
        self.gpu_hours_there += self.whole.gpus * hours
        self.cpu_hours_there += self.whole.cpus * hours
        self._decay_history(span)
        self.dues.count(span, self.whole)

    def has(self, nodes: Iterable[Node]) -> None:
        self.whole = Cluster(nodes).whole

    def end(self, now: datetime) -> None:
        self.last_end = now
        self._until_last_end = (self.gpu_hours_there, self.cpu_hours_there)

    # -------------------------------------------------------------------------------------------- jobs

    def waits(self, case: SimulatedJob) -> None:
        self.dues.want(case.request.queue, case.amount)

    def waits_no_more(self, case: SimulatedJob) -> None:
        if case.reason not in PERMANENT_REASONS:
            self.dues.want_no_more(case.request.queue, case.amount)

    def hopes(self, case: SimulatedJob, may: bool) -> None:
        """Count a waiting job in the backlog again, or no more if it can never start."""
        change = self.dues.want if may else self.dues.want_no_more
        change(case.request.queue, case.amount)

    def holds(self, case: SimulatedJob) -> None:
        for queue in self._above.get(case.request.queue, ()):
            self._held[queue] = self._held[queue].plus(case.amount)
        self.dues.hold(case.request.queue, case.amount)

    def releases(self, case: SimulatedJob, used: BudgetUse) -> None:
        for queue in self._above.get(case.request.queue, ()):
            self._held[queue] = self._held[queue].less(case.amount)
        self.dues.hold_no_more(case.request.queue, case.amount)
        if case.request.workspace is not None:
            self._spent[case.request.workspace] = self._spent[case.request.workspace].plus(used)

    # -------------------------------------------------------------------------------- snapshots

    def queues(self) -> tuple[Queue, ...]:
        return tuple(
            [
                queue if queue.history == now else queue.model_copy(update={"history": now})
                for queue in self.world.queues
                for now in (self._past[queue.name].share_of(self.whole),)
            ]
        )

    def budgets(self, running: Iterable[SimulatedJob]) -> tuple[Budget, ...]:
        """Return the budgets with what is left now."""
        if not self.world.budgets:
            return ()
        used = self._spent.copy()
        for case in running:
            if case.request.workspace is not None:
                used[case.request.workspace] = used[case.request.workspace].plus(
                    case.used_since_start(self.now)
                )
        return tuple([left_of(budget, used[budget.workspace]) for budget in self.world.budgets])

    def _decay_history(self, span: timedelta) -> None:
        kept = 0.5 ** (span / self.world.assume.half_life)
        for name in self._queues:
            held, past = self._held[name], self._past[name]
            if past.initial or past.averages != NO_AVERAGES or held != NOTHING:
                averages = tuple(
                    [was * kept + now * (1 - kept) for was, now in zip(past.averages, held, strict=True)]
                )
                self._past[name] = DecayedShare(past.initial * kept, averages)


def left_of(budget: Budget, used: BudgetUse) -> Budget:
    return Budget(
        workspace=budget.workspace,
        gpu_hours=None if budget.gpu_hours is None else budget.gpu_hours - used.gpu_hours,
        money=None if budget.money is None else budget.money - used.money,
    )
