"""What jobs hold and what machines have, as plain figures, and what an hour of it costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from falaj.records.scheduling.snapshot import WHOLE_GPU, Node, Placement, Price, Request
from falaj.scheduling.capacity.cluster import Cluster
from falaj.scheduling.capacity.resources import requested_amount


class Amount(NamedTuple):
    """GPUs in thousandths."""

    cpus: int = 0
    gpus_milli: int = 0
    memory: int = 0

    @property
    def gpus(self) -> float:
        return self.gpus_milli / WHOLE_GPU

    def plus(self, other: Amount) -> Amount:
        return Amount(self.cpus + other.cpus, self.gpus_milli + other.gpus_milli, self.memory + other.memory)

    def less(self, other: Amount) -> Amount:
        return Amount(self.cpus - other.cpus, self.gpus_milli - other.gpus_milli, self.memory - other.memory)

    def share_of(self, whole: Amount) -> float:
        """The dominant share: the largest part of any resource that there is."""
        return max((part / there for part, there in zip(self, whole, strict=True) if there), default=0.0)


class BudgetUse(NamedTuple):
    """What budgets are used up by."""

    gpu_hours: float = 0.0
    money: float = 0.0

    def plus(self, other: BudgetUse) -> BudgetUse:
        return BudgetUse(self.gpu_hours + other.gpu_hours, self.money + other.money)


def amount_of(request: Request) -> Amount:
    """What the whole gang holds, as the scheduler counts it: a slice by its sevenths of a card."""
    return Amount(*requested_amount(request))


def whole_of(nodes: Iterable[Node]) -> Amount:
    return Amount(*Cluster(nodes).whole)


def price_an_hour(
    request: Request, placements: Sequence[Placement], price: Price, models: Mapping[str, str]
) -> float:
    """`models` names the model of every GPU by its id. With GPUs of several models, each counts alike."""
    held = amount_of(request)
    each = [price.gpus.get(models[gpu], price.gpu) for place in placements for gpu in place.gpus]
    return held.cpus * price.cpu + (held.gpus * sum(each) / len(each) if each else 0.0)
