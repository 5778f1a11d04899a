"""What queues have held lately: averages in which the longer ago counts the less."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

from falaj.records.scheduling.snapshot import WHOLE_GPU, Node
from falaj.scheduling.capacity.resources import slice_thousandths

HALF_LIVES_KEPT = 6
"""Half-lives after which what was held is forgotten: it would count less than a sixtieth."""


class ResourceAverages(NamedTuple):
    """Resources, as fractions of which shares are made."""

    cpus: float = 0.0
    gpus: float = 0.0
    memory_bytes: float = 0.0

    def plus(self, other: ResourceAverages) -> ResourceAverages:
        return ResourceAverages(
            self.cpus + other.cpus, self.gpus + other.gpus, self.memory_bytes + other.memory_bytes
        )

    def times(self, factor: float) -> ResourceAverages:
        return ResourceAverages(self.cpus * factor, self.gpus * factor, self.memory_bytes * factor)


class UsageSpan(NamedTuple):
    """What was held from one moment to another; no end: it still is."""

    held: ResourceAverages
    start: datetime
    end: datetime | None = None


def weight_of(start: datetime, end: datetime, *, now: datetime, half_life: timedelta) -> float:
    """How much a stretch of time counts in the average up to `now`; all of the past together counts 1."""
    return max(
        decay_factor(end, now=now, half_life=half_life) - decay_factor(start, now=now, half_life=half_life),
        0.0,
    )


def decay_factor(moment: datetime, *, now: datetime, half_life: timedelta) -> float:
    """1 for now and later, a half for one half-life ago, and so on."""
    ago: float = max((now - moment) / half_life, 0.0)
    return float(0.5**ago) if ago < 1000 else 0.0


def averaged(stretches: Iterable[UsageSpan], *, now: datetime, half_life: timedelta) -> ResourceAverages:
    """What was held on average."""
    total = ResourceAverages()
    for each in stretches:
        weight = weight_of(each.start, each.end or now, now=now, half_life=half_life)
        total = total.plus(each.held.times(weight))
    return total


def cluster_total(nodes: Iterable[Node]) -> ResourceAverages:
    """All that the machines have."""
    whole = ResourceAverages()
    for node in nodes:
        milli = [slice_thousandths(gpu.profile) if gpu.profile else WHOLE_GPU for gpu in node.gpus]
        whole = whole.plus(ResourceAverages(node.cpus, sum(milli) / WHOLE_GPU, node.memory_bytes))
    return whole


def dominant_share(held: ResourceAverages, whole: ResourceAverages) -> float:
    """The largest share of any resource; one that there is nothing of has no share."""
    return max((part / of for part, of in zip(held, whole, strict=True) if of > 0), default=0.0)
