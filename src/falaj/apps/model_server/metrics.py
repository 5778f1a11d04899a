"""Metrics of the model server: plain counters, converted to Prometheus families when scraped."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from falaj.apps.byte_shares import ByteShares
from falaj.apps.model_server import ensemble_metrics, triton_metrics
from falaj.apps.model_server.ensemble_metrics import cumulative
from falaj.apps.model_server.replica_metrics import ReplicaMetrics
from falaj.apps.model_server.triton_metrics import ModelTotals
from falaj.records.names import ObjectId
from falaj.records.serving.statistics import BOUNDS_S, ReplicaUsage, ServerLoad, VersionLoad
from falaj.serving.deployment_state import ServedEndpoint
from falaj.serving.lookups.joins import AGES_S
from falaj.serving.runtime.batch_queue import BatchQueue
from falaj.serving.runtime.ensembles.engine import EnsembleEngine
from falaj.serving.runtime.metering import MeteredEngine


class VersionMetrics:
    """Counts of one version of an endpoint."""

    __slots__ = ("buckets", "failed_rows", "failed_seconds", "fallbacks", "rows", "seconds", "statuses")

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.fallbacks: Counter[str] = Counter()
        """Requests that the fallback took over, by the error of this version."""
        self.rows = 0
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        self.seconds = 0.0
        self.failed_seconds = 0.0
        self.failed_rows = 0
        """The parts of `seconds` and `rows` of requests that failed."""

    def count(self, status: int, seconds: float, *, rows: int = 0, requests: int = 1) -> None:
        """Count requests that took `seconds` each and have `rows` together."""
        self.statuses[status] += requests
        self.rows += rows
        if status != 200:
            self.failed_seconds += seconds * requests
            self.failed_rows += rows
        self.buckets[bisect_left(BOUNDS_S, seconds)] += requests
        self.seconds += seconds * requests


class ServerMetrics:
    """All metrics of a server; a Prometheus collector."""

    def __init__(self, shares: ByteShares) -> None:
        self._shares = shares
        self.replica = "0"
        """Which of the replicas this process is."""
        self._versions: dict[tuple[str, str], VersionMetrics] = {}
        self.served: Mapping[str, ServedEndpoint] = {}
        self.meters: WeakKeyDictionary[BatchQueue, MeteredEngine] = WeakKeyDictionary()
        """The runs of each queue."""
        self.ensembles: WeakKeyDictionary[BatchQueue, EnsembleEngine] = WeakKeyDictionary()
        """The ensembles among them."""
        self.shadow_outcomes: Counter[tuple[str, str, str]] = Counter()
        """Copies of requests by endpoint, version, and what became of them."""
        self.connections = 0
        self.refused: Counter[int] = Counter()
        self.reloads: Counter[str] = Counter()
        self.unlogged = 0
        self.traces: Mapping[str, int] = {}
        """Traces by what became of them: sent, failed or dropped."""
        self.peers: ReplicaMetrics | None = None
        """The replicas beside this one, if there are."""
        self._registry = CollectorRegistry()
        self._registry.register(self)

    @property
    def held_bytes(self) -> int:
        return self._shares.held

    def of_version(self, endpoint: str, version: str) -> VersionMetrics:
        return self._versions.setdefault((endpoint, version), VersionMetrics())

    def snapshot(self) -> dict[tuple[str, str], VersionMetrics]:
        """Return counts by endpoint and version; version "" counts requests rejected before a version was chosen."""
        return dict(self._versions)

    def render(self) -> bytes:
        """Return all metrics as text: ours, and those that Triton has under the names that it gives them."""
        text = self._own_text()
        if self.peers is None:
            return text.encode()
        return self.peers.combined(text, self._own_load().model_dump_json()).encode()

    def store(self) -> None:
        """Write the metrics for the replicas beside this one, if there are."""
        if self.peers is not None:
            self.peers.store(self._own_text(), self._own_load().model_dump_json())

    def _own_text(self) -> str:
        totals = triton_metrics.render(self.model_totals(), replica=self.replica)
        return (generate_latest(self._registry) + totals).decode()

    def load(self) -> ServerLoad:
        """Return what the server does now, with the replicas beside this one, for `endpoints.load`."""
        own = self._own_load()
        others = [] if self.peers is None else [each for each in self.peers.others() if each.is_running]
        loads = [own, *(ServerLoad.model_validate_json(each.load) for each in others)]
        return ServerLoad(
            replicas=tuple(replica for load in loads for replica in load.replicas),
            versions=tuple(version for load in loads for version in load.versions),
        )

    def _own_load(self) -> ServerLoad:
        versions = [
            VersionLoad(
                endpoint=ObjectId(served.endpoint.id or name),
                name=name,
                version=version,
                replica=self.replica,
                requests=sum(known.statuses.values()),
                errors=sum(known.statuses.values()) - known.statuses[200],
                rows=known.rows,
                latency=tuple(known.buckets),
                batches=queue.batches,
                batch_rows=queue.rows,
                waiting=queue.waiting,
            )
            for name, served in self.served.items()
            for version, queue in served.queues.items()
            for known in [self.of_version(name, version)]
        ]
        replica = ReplicaUsage(
            replica=self.replica,
            pid=os.getpid(),
            clock_s=time.perf_counter(),
            cpu_s=time.process_time(),
            rss_bytes=_rss_bytes(),
            connections=self.connections,
        )
        return ServerLoad(replicas=(replica,), versions=tuple(versions))

    def model_totals(self) -> dict[tuple[str, str], ModelTotals]:
        return triton_metrics.model_totals(self.served, self._counted, self.meters.get)

    def _counted(self, endpoint: str, version: str) -> tuple[Mapping[int, int], float]:
        known = self._versions.get((endpoint, version))
        return ({}, 0.0) if known is None else (dict(known.statuses), known.seconds)

    def collect(self) -> Iterable[Metric]:
        yield from self._requests()
        yield from self._queue_metrics()
        yield from self._overload_metrics()
        yield from ensemble_metrics.families(self._served_ensembles())
        yield self._shadow_metrics()
        yield from self._lookup_metrics()
        yield GaugeMetricFamily("falaj_serving_connections", "Open connections", self.connections)
        yield GaugeMetricFamily("falaj_serving_held_bytes", "Bytes of unanswered requests", self.held_bytes)
        yield _counter("refused", "Requests refused before they reached an endpoint", "status", self.refused)
        yield _counter("reloads", "Changes of what is served", "outcome", self.reloads)
        yield _counter("traces", "Traces of requests: sent, failed or dropped", "outcome", dict(self.traces))
        yield CounterMetricFamily(
            "falaj_serving_unlogged", "Batches that the log did not take", self.unlogged
        )

    def _requests(self) -> Iterable[Metric]:
        names = ["endpoint", "version"]
        requests = CounterMetricFamily(
            "falaj_serving_requests", "Inference requests", labels=[*names, "status"]
        )
        seconds = HistogramMetricFamily("falaj_serving_seconds", "From request to answer", labels=names)
        for labels, metrics in self._versions.items():
            for status, number in metrics.statuses.items():
                requests.add_metric([*labels, str(status)], number)
            seconds.add_metric(labels, cumulative(BOUNDS_S, metrics.buckets), metrics.seconds)
        fallbacks = CounterMetricFamily(
            "falaj_serving_fallbacks", "Requests that the fallback answered", labels=[*names, "reason"]
        )
        for labels, metrics in self._versions.items():
            for reason, number in metrics.fallbacks.items():
                fallbacks.add_metric([*labels, reason], number)
        return requests, seconds, fallbacks

    def _shadow_metrics(self) -> Metric:
        copies = CounterMetricFamily(
            "falaj_serving_shadow_requests",
            "Copies of requests for shadows: compared, failed or dropped",
            labels=["endpoint", "version", "outcome"],
        )
        names = {found.endpoint.id or name: name for name, found in self.served.items()}
        for (endpoint, version, outcome), number in list(self.shadow_outcomes.items()):
            copies.add_metric([names.get(endpoint, endpoint), version, outcome], number)
        return copies

    def _lookup_metrics(self) -> Iterable[Metric]:
        missing = CounterMetricFamily(
            "falaj_serving_missing_features",
            "Looked up values that were not there",
            labels=["endpoint", "view", "reason"],
        )
        ages = HistogramMetricFamily(
            "falaj_serving_feature_age_seconds", "Age of the oldest feature of a request", labels=["endpoint"]
        )
        for name, served in self.served.items():
            meter = served.lookups
            for (view, reason), number in list(meter.missing.items()):
                missing.add_metric([name, view, reason], number)
            if served.joins:
                ages.add_metric([name], cumulative(AGES_S, meter.ages), meter.age_sum_s)
        return missing, ages

    def _queue_metrics(self) -> Iterable[Metric]:
        names = ["model", "version"]
        batches = CounterMetricFamily("falaj_serving_batches", "Runs of a model", labels=names)
        rows = CounterMetricFamily("falaj_serving_rows", "Rows that a model was given", labels=names)
        waiting = GaugeMetricFamily("falaj_serving_waiting", "Requests in the queue", labels=names)
        queues = {id(queue): queue for served in self.served.values() for queue in served.queues.values()}
        for queue in queues.values():
            labels = [queue.model.name, queue.model.version]
            batches.add_metric(labels, queue.batches)
            rows.add_metric(labels, queue.rows)
            waiting.add_metric(labels, queue.waiting)
        return batches, rows, waiting

    def _served_ensembles(self) -> list[EnsembleEngine]:
        queues = {id(queue): queue for served in self.served.values() for queue in served.queues.values()}
        return [found for queue in queues.values() if (found := self.ensembles.get(queue)) is not None]

    def _overload_metrics(self) -> Iterable[Metric]:
        names = ["model", "version"]
        dropped = CounterMetricFamily(
            "falaj_serving_dropped", "Requests that were not run, by reason", labels=[*names, "reason"]
        )
        overloaded = GaugeMetricFamily(
            "falaj_serving_overloaded", "1 while requests of a model are refused", labels=names
        )
        queues = {id(queue): queue for served in self.served.values() for queue in served.queues.values()}
        for queue in queues.values():
            labels = [queue.model.name, queue.model.version]
            dropped.add_metric([*labels, "overload"], queue.refused)
            dropped.add_metric([*labels, "deadline"], queue.expired)
            overloaded.add_metric(labels, queue.is_overloaded)
        return dropped, overloaded


def _rss_bytes() -> int:
    """Return the resident memory of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as pages:
            return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _counter(
    name: str, description: str, label: str, counts: Mapping[str, int] | Mapping[int, int]
) -> Metric:
    family = CounterMetricFamily(f"falaj_serving_{name}", description, labels=[label])
    for value, number in counts.items():
        family.add_metric([str(value)], number)
    return family
