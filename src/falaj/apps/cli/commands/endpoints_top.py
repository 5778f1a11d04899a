"""`falaj endpoints top`: requests, latency and queues of each version, refreshed until q or Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime

from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.output.live_table import Every, Once, Screen, parse_interval, show_live
from falaj.apps.cli.output.values import plural, printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.records.record import Record, utc_now
from falaj.records.serving.statistics import ReplicaUsage, ServerLoad, VersionLoad, percentile_ms
from falaj.records.sizes import format_size
from falaj.sdk.platform import Platform

SAMPLE_S = 1.0
"""Over how long rates are measured if they are shown once."""

HEADINGS = ("endpoint", "version", "requests/s", "p50 ms", "p99 ms", "errors/s", "waiting", "rows/s", "batch")
"""Where several replicas answer, `replica` stands behind the version."""


class VersionRates(Record):
    """A version on one replica, between two moments; `batch_rows` are the rows of its average batch."""

    endpoint: str
    version: str
    replica: str
    requests_per_s: float
    errors_per_s: float
    rows_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    waiting: int
    batch_rows: float | None


class ReplicaRates(Record):
    """A process of the model server; `cpu` 1.0 is one core."""

    replica: str
    pid: int
    cpu: float
    rss_bytes: int
    connections: int


class TopRates(Record):
    """What the model server did in the last seconds."""

    at: datetime
    over_s: float
    replicas: tuple[ReplicaRates, ...]
    versions: tuple[VersionRates, ...]


def top(
    session: Session,
    *,
    once: Once = False,
    every: Every = "2s",
    workspace: arguments.OF_WORKSPACE = None,
) -> int:
    """Show requests, latency, errors and queues of each version of the endpoints, until q or Ctrl-C."""
    pause = parse_interval(every)
    parsing.check(all_operations()["endpoints.load"], {"workspace": workspace})
    with session.platform() as platform:
        poller = RatePoller(platform, workspace)
        return show_live(session, poller.poll, lines, once=once, every=pause)


class RatePoller:
    """Polls a platform, and returns the rates since the last poll; the first one measures over a second."""

    def __init__(self, platform: Platform, workspace: str | None) -> None:
        self._platform, self._workspace = platform, workspace
        self._before: ServerLoad | None = None

    def poll(self) -> TopRates:
        before = self._before
        if before is None:
            before = self._platform.endpoints.load(workspace=self._workspace)
            time.sleep(SAMPLE_S)
        self._before = self._platform.endpoints.load(workspace=self._workspace)
        return rates_between(before, self._before)


def rates_between(before: ServerLoad, now: ServerLoad) -> TopRates:
    """Return the rates between two moments. A replica that has started meanwhile is counted from its start."""
    earlier = {each.replica: each for each in before.replicas}
    known = {(each.endpoint, each.version, each.replica): each for each in before.versions}
    elapsed: dict[str, float] = {}
    replicas = []
    for each in now.replicas:
        old = earlier.get(each.replica)
        is_same = old is not None and old.pid == each.pid
        elapsed[each.replica] = (
            max(each.clock_s - old.clock_s, 1e-9) if old is not None and is_same else SAMPLE_S
        )
        replicas.append(_replica(each, old if is_same else None, elapsed[each.replica]))
    same = {each.replica for each in now.replicas if earlier.get(each.replica, each).pid == each.pid}
    versions = [
        _version(
            each,
            known.get((each.endpoint, each.version, each.replica)) if each.replica in same else None,
            elapsed.get(each.replica, SAMPLE_S),
        )
        for each in now.versions
    ]
    over_s = max(elapsed.values(), default=0.0)
    return TopRates(at=utc_now(), over_s=over_s, replicas=tuple(replicas), versions=tuple(versions))


def _replica(now: ReplicaUsage, old: ReplicaUsage | None, elapsed_s: float) -> ReplicaRates:
    spent = now.cpu_s - old.cpu_s if old is not None else 0.0
    return ReplicaRates(
        replica=now.replica,
        pid=now.pid,
        cpu=spent / elapsed_s,
        rss_bytes=now.rss_bytes,
        connections=now.connections,
    )


def _version(now: VersionLoad, old: VersionLoad | None, elapsed_s: float) -> VersionRates:
    latency = _since(now.latency, () if old is None else old.latency)
    batches = now.batches - (0 if old is None else old.batches)
    batch_rows = now.batch_rows - (0 if old is None else old.batch_rows)
    return VersionRates(
        endpoint=now.name,
        version=now.version,
        replica=now.replica,
        requests_per_s=(now.requests - (0 if old is None else old.requests)) / elapsed_s,
        errors_per_s=(now.errors - (0 if old is None else old.errors)) / elapsed_s,
        rows_per_s=(now.rows - (0 if old is None else old.rows)) / elapsed_s,
        p50_ms=percentile_ms(latency, 0.5),
        p99_ms=percentile_ms(latency, 0.99),
        waiting=now.waiting,
        batch_rows=batch_rows / batches if batches else None,
    )


def _since(now: Sequence[int], old: Sequence[int]) -> list[int]:
    return [count - (old[place] if place < len(old) else 0) for place, count in enumerate(now)]


def lines(found: TopRates) -> Screen:
    """Return the lines above the table, and the table: the busiest versions first."""
    total = sum(each.requests_per_s for each in found.versions)
    head = [f"{plural(len(found.versions), 'version')} served, {total:.4g} requests/s"]
    head += [
        f"replica {printable(each.replica)}: {each.cpu:.0%} of a core, {format_size(each.rss_bytes)}, "
        f"{plural(each.connections, 'connection')}"
        for each in found.replicas
    ]
    busiest = sorted(found.versions, key=lambda each: -each.requests_per_s)
    rows = [_row(each) for each in busiest]
    headings = list(HEADINGS)
    if len({each.replica for each in found.versions}) > 1:
        headings.insert(2, "replica")
        for row, each in zip(rows, busiest, strict=True):
            row.insert(2, printable(each.replica))
    return Screen(head, headings, rows, shrinking=("endpoint",))


def _row(each: VersionRates) -> list[str]:
    return [
        *(printable(each.endpoint), each.version),
        f"{each.requests_per_s:.4g}",
        *(_figure(each.p50_ms), _figure(each.p99_ms)),
        f"{each.errors_per_s:.3g}",
        str(each.waiting),
        f"{each.rows_per_s:.4g}",
        _figure(each.batch_rows),
    ]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
