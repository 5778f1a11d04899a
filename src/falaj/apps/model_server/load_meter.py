"""Measures the load of a replica from its counters, at no cost for requests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from falaj.apps.model_server.metrics import ServerMetrics
from falaj.records.control.replicas import RecentLoad
from falaj.records.serving.statistics import BOUNDS_S, percentile_ms

OVERLOADED = (429, 503)


class LoadMeter:
    """Returns the load since its last reading."""

    def __init__(self, metrics: ServerMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._before = self._totals()
        self._at = clock()

    def read(self, in_flight: int) -> RecentLoad:
        """Return the load since the last call; `in_flight` requests are being answered now.

        By Little's law the time that all requests took, per second, is their average number at a time.
        """
        now, totals = self._clock(), self._totals()
        took = max(now - self._at, 1e-3)
        new = [after - before for after, before in zip(totals, self._before, strict=True)]
        self._at, self._before = now, totals
        seconds, refused, *buckets = new
        latency = [round(each) for each in buckets]
        return RecentLoad(
            in_flight=max(float(in_flight), seconds / took),
            requests_per_s=sum(latency) / took,
            refused_per_s=refused / took,
            p50_ms=percentile_ms(latency, 0.5),
            p99_ms=percentile_ms(latency, 0.99),
            rss_bytes=_resident_bytes(),
        )

    def _totals(self) -> list[float]:
        """Return seconds, refused requests, and requests by latency bucket, of all versions."""
        found = [0.0] * (2 + len(BOUNDS_S) + 1)
        for each in self._metrics.snapshot().values():
            found[0] += each.seconds
            found[1] += sum(each.statuses[status] for status in OVERLOADED)
            for place, number in enumerate(each.buckets, 2):
                found[place] += number
        return found


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
