"""Exponentially decayed averages of the usage of queues."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

from falaj.records.scheduling.snapshot import WHOLE_GPU, Node
from falaj.scheduling.capacity.resources import slice_thousandths

HALF_LIVES_KEPT = 6
"""Half-lives after which usage is ignored: its weight is below 1/60."""


class ResourceAverages(NamedTuple):
    """CPUs, GPUs and bytes averaged over time, as floats; `ResourceAmount` is an exact amount at one time."""

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
    """Resources held over a time span; end None: still held."""

    held: ResourceAverages
    start: datetime
    end: datetime | None = None


def weight_of(start: datetime, end: datetime, *, now: datetime, half_life: timedelta) -> float:
    """Return the weight of a time span in the average up to `now`; all of the past has weight 1."""
    return max(
        decay_factor(end, now=now, half_life=half_life) - decay_factor(start, now=now, half_life=half_life),
        0.0,
    )


def decay_factor(moment: datetime, *, now: datetime, half_life: timedelta) -> float:
    """Return 1 for now and later, 0.5 for one half-life ago, and so on."""
    ago: float = max((now - moment) / half_life, 0.0)
    return float(0.5**ago) if ago < 1000 else 0.0


def averaged(spans: Iterable[UsageSpan], *, now: datetime, half_life: timedelta) -> ResourceAverages:
    """Return the decayed average of the usage."""
    total = ResourceAverages()
    for each in spans:
        weight = weight_of(each.start, each.end or now, now=now, half_life=half_life)
        total = total.plus(each.held.times(weight))
    return total


def cluster_total(nodes: Iterable[Node]) -> ResourceAverages:
    """Return the total capacity of the nodes."""
    whole = ResourceAverages()
    for node in nodes:
        milli = [slice_thousandths(gpu.profile) if gpu.profile else WHOLE_GPU for gpu in node.gpus]
        whole = whole.plus(ResourceAverages(node.cpus, sum(milli) / WHOLE_GPU, node.memory_bytes))
    return whole
