"""Compare what each queue holds with its fair share, while it has waiting jobs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from falaj.records.scheduling.simulation import NO_TIME, Fairness, QueueFairness
from falaj.records.scheduling.snapshot import Queue
from falaj.scheduling.capacity.resources import NOTHING, ResourceAmount, dominant_share


@dataclass
class FairShareSums:
    """Integrals of shares over the seconds in which a queue had waiting jobs."""

    backlogged: timedelta = NO_TIME
    entitled: float = 0.0
    held: float = 0.0
    short: float = 0.0


class FairShareTracker:
    """Integrates held and entitled shares of the queues over virtual time."""

    def __init__(self, queues: Iterable[Queue]) -> None:
        self._queues = {queue.name: queue for queue in queues}
        self._below: dict[str | None, list[Queue]] = defaultdict(list)
        for queue in self._queues.values():
            self._below[queue.parent if queue.parent in self._queues else None].append(queue)
        self._wanted: dict[str, ResourceAmount] = {}
        self._waiting: dict[str, int] = defaultdict(int)
        self._held: dict[str, ResourceAmount] = {}
        self._counted: dict[str, FairShareSums] = {}

    def want(self, queue: str, amount: ResourceAmount) -> None:
        self._wanted[queue] = self._wanted.get(queue, NOTHING).plus(amount)
        self._waiting[queue] += 1

    def want_no_more(self, queue: str, amount: ResourceAmount) -> None:
        self._wanted[queue] = self._wanted[queue].less(amount)
        self._waiting[queue] -= 1

    def hold(self, queue: str, amount: ResourceAmount) -> None:
        self._held[queue] = self._held.get(queue, NOTHING).plus(amount)

    def hold_no_more(self, queue: str, amount: ResourceAmount) -> None:
        self._held[queue] = self._held[queue].less(amount)

    def count(self, span: timedelta, whole: ResourceAmount) -> None:
        waiting = [queue for queue, jobs in self._waiting.items() if jobs and queue in self._queues]
        if not waiting:
            return
        seconds = span.total_seconds()
        dues = self._entitled(whole)
        for queue in waiting:
            held = dominant_share(self._held.get(queue, NOTHING), whole)
            due = dues.get(queue, 0.0)
            sums = self._counted.setdefault(queue, FairShareSums())
            sums.backlogged += span
            sums.entitled += due * seconds
            sums.held += held * seconds
            sums.short += max(due - held, 0.0) * seconds

    def fairness(self) -> Fairness:
        found = tuple(fair_share_of(queue, sums) for queue, sums in sorted(self._counted.items()))
        ratios = [due.held / due.entitled for due in found if due.entitled]
        return Fairness(
            jain=jain(ratios), largest_deviation=max((due.short for due in found), default=0.0), queues=found
        )

    def _entitled(self, whole: ResourceAmount) -> dict[str, float]:
        wishes = {}
        for queue in self._queues:
            wish = self._held.get(queue, NOTHING).plus(self._wanted.get(queue, NOTHING))
            if wish != NOTHING:
                wishes[queue] = min(dominant_share(wish, whole), 1.0)
        return entitlements(wishes, self._below)


def fair_share_of(queue: str, sums: FairShareSums) -> QueueFairness:
    seconds = sums.backlogged.total_seconds()
    return QueueFairness(
        queue=queue,
        backlogged=sums.backlogged,
        entitled=sums.entitled / seconds,
        held=sums.held / seconds,
        short=sums.short / seconds,
    )


def jain(figures: Sequence[float]) -> float:
    """Return Jain's fairness index: 1 if all are equal, 1/n if one has everything; 1 for none."""
    squares = sum(figure * figure for figure in figures)
    return sum(figures) ** 2 / (len(figures) * squares) if squares else 1.0


def entitlements(
    wishes: Mapping[str, float], below: Mapping[str | None, Sequence[Queue]]
) -> dict[str, float]:
    """Return the entitled share of each queue: 1 divided by weight down the tree among queues with demand.

    The own jobs of a queue with children count as another child with weight 1.
    """
    sums: dict[str, float] = {}

    def total(queue: Queue) -> float:
        own = wishes.get(queue.name, 0.0)
        sums[queue.name] = own + sum(total(child) for child in below.get(queue.name, ()))
        return sums[queue.name]

    for root in below.get(None, ()):
        total(root)
    found: dict[str, float] = {}

    def divide(parent: str | None, amount: float) -> None:
        children = [queue for queue in below.get(parent, ()) if sums[queue.name]]
        asked = [(sums[queue.name], queue.weight) for queue in children]
        if parent is not None:
            asked.append((wishes.get(parent, 0.0), 1.0))
        parts = water_filling(asked, amount)
        if parent is not None:
            found[parent] = parts.pop()
        for queue, part in zip(children, parts, strict=True):
            divide(queue.name, part)

    divide(None, 1.0)
    return found


def water_filling(asked: Sequence[tuple[float, float]], amount: float) -> list[float]:
    """Divide `amount` among (demand, weight) pairs by weighted max-min fairness."""
    parts = [0.0] * len(asked)
    weights = sum(weight for wish, weight in asked if wish)
    for index in sorted(range(len(asked)), key=lambda i: asked[i][0] / asked[i][1]):
        wish, weight = asked[index]
        if wish:
            parts[index] = min(wish, amount * weight / weights)
            amount -= parts[index]
            weights -= weight
            if weights <= 0:
                break
    return parts
