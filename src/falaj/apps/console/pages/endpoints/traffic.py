"""Requests per second and latency of versions, from two counts that grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from nicegui import ui

from falaj.apps.console.charts.element import chart, replace_chart
from falaj.apps.console.charts.lines import Curve, line_chart
from falaj.apps.console.charts.options import Options
from falaj.apps.console.charts.palette import Palette, palette
from falaj.apps.console.page import PageContext
from falaj.apps.console.sampling import sample_together
from falaj.records.record import utc_now
from falaj.records.serving.statistics import ServerLoad, VersionLoad, percentile_ms

KEPT = 240
"""Samples that a chart shows; those before are forgotten."""
SAMPLE_S = 2.5
SINCE = "Of each version, since this page was opened."


@dataclass(frozen=True)
class VersionRate:
    """What one version of an endpoint does, over all replicas."""

    endpoint: str
    version: str
    requests_per_s: float
    errors_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    waiting: int


def rates_between(before: ServerLoad, now: ServerLoad) -> tuple[VersionRate, ...]:
    """Return the rates between two counts; a replica that is new, or was started anew, counts from its start on."""
    clocks = {each.replica: each for each in before.replicas}
    elapsed = {
        each.replica: max(each.clock_s - old.clock_s, 1e-3)
        for each in now.replicas
        if (old := clocks.get(each.replica)) is not None and old.pid == each.pid
    }
    earlier = {(each.endpoint, each.version, each.replica): each for each in before.versions}
    groups: dict[tuple[str, str], list[tuple[VersionLoad, VersionLoad | None, float]]] = {}
    for each in now.versions:
        if (seconds := elapsed.get(each.replica)) is not None:
            counted = earlier.get((each.endpoint, each.version, each.replica))
            groups.setdefault((each.name, each.version), []).append((each, counted, seconds))
    return tuple(_rate(*key, members) for key, members in sorted(groups.items()))


def _rate(
    endpoint: str, version: str, members: Sequence[tuple[VersionLoad, VersionLoad | None, float]]
) -> VersionRate:
    latency: list[int] = []
    requests = errors = 0.0
    for now, old, seconds in members:
        requests += (now.requests - (old.requests if old else 0)) / seconds
        errors += (now.errors - (old.errors if old else 0)) / seconds
        before = old.latency if old else ()
        grown = [count - (before[at] if at < len(before) else 0) for at, count in enumerate(now.latency)]
        longest = max(len(grown), len(latency))
        latency = [
            (latency[at] if at < len(latency) else 0) + (grown[at] if at < len(grown) else 0)
            for at in range(longest)
        ]
    return VersionRate(
        endpoint=endpoint,
        version=version,
        requests_per_s=max(requests, 0.0),
        errors_per_s=max(errors, 0.0),
        p50_ms=percentile_ms(latency, 0.5),
        p99_ms=percentile_ms(latency, 0.99),
        waiting=sum(now.waiting for now, _, _ in members),
    )


def load_of(load: ServerLoad, endpoint: str) -> ServerLoad:
    """Return the load of one endpoint alone: those who look at it may not see the others."""
    own = tuple(each for each in load.versions if each.name == endpoint)
    return load.model_copy(update={"versions": own})


@dataclass(eq=False)
class TrafficHistory:
    """The samples since the page was opened."""

    samples: list[tuple[datetime, tuple[VersionRate, ...]]] = field(default_factory=list)
    _last: ServerLoad | None = None

    def add(self, now: ServerLoad, at: datetime) -> None:
        """Add counts; the first ones give no rates."""
        if self._last is not None:
            self.samples.append((at, rates_between(self._last, now)))
            del self.samples[:-KEPT]
        self._last = now

    def throughput(self, endpoint: str, colours: Palette) -> Options:
        """Return the chart of requests per second, by version."""
        curves = [
            Curve(f"version {version}", *self._points(endpoint, version, "requests_per_s"))
            for version in self._versions(endpoint)
        ]
        title = f"Requests per second of each version of {endpoint}, since the page was opened"
        return _over_time(curves, colours, title=title, y_name="requests", y_unit="1/s")

    def latency(self, endpoint: str, colours: Palette) -> Options:
        """Return the chart of the median and of the 99th percentile of latency, by version."""
        curves = [
            Curve(f"version {version} {words}", *self._points(endpoint, version, name))
            for version in self._versions(endpoint)
            for words, name in (("p50", "p50_ms"), ("p99", "p99_ms"))
        ]
        title = f"Latency of each version of {endpoint}, since the page was opened"
        return _over_time(curves, colours, title=title, y_name="latency", y_unit="ms")

    def _versions(self, endpoint: str) -> list[str]:
        seen = {each.version for _, rates in self.samples for each in rates if each.endpoint == endpoint}
        return sorted(seen, key=lambda version: (len(version), version))

    def _points(
        self, endpoint: str, version: str, name: str
    ) -> tuple[tuple[float, ...], tuple[float | None, ...]]:
        found = [
            (at.timestamp() * 1000, getattr(each, name))
            for at, rates in self.samples
            for each in rates
            if (each.endpoint, each.version) == (endpoint, version)
        ]
        return tuple(x for x, _ in found), tuple(y for _, y in found)


def _over_time(curves: Sequence[Curve], colours: Palette, *, title: str, y_name: str, y_unit: str) -> Options:
    options = line_chart(
        curves, colours, title=title, x_name="time", y_name=y_name, y_unit=y_unit, x_time=True
    )
    options["yAxis"] |= {"min": 0} if curves else {"min": 0, "max": 1}  # an axis without values has no room
    return options


class TrafficPanel:
    """The two live charts of an endpoint."""

    def __init__(self, context: PageContext, endpoint: str) -> None:
        self._context, self._endpoint = context, endpoint
        self._history = TrafficHistory()

    def draw(self) -> None:
        colours = palette(self._context.is_dark)
        with ui.element("div").classes("columns"):
            with ui.element("section").classes("panel"):
                ui.label("Throughput").classes("panel-title").props("role=heading aria-level=2")
                ui.label(SINCE).classes("muted small")
                self._throughput = chart(self._history.throughput(self._endpoint, colours), height_px=240)
            with ui.element("section").classes("panel"):
                ui.label("Latency").classes("panel-title").props("role=heading aria-level=2")
                ui.label(SINCE).classes("muted small")
                self._latency = chart(self._history.latency(self._endpoint, colours), height_px=240)

        here, endpoint = self._context.workspace, self._endpoint
        sample_together(
            self._context,
            ("load", here, endpoint),
            lambda p: load_of(p.endpoints.load(workspace=here), endpoint),
            self._take,
            every_s=SAMPLE_S,
        )

    def _take(self, load: ServerLoad) -> None:
        """Draw what new counts add."""
        colours = palette(self._context.is_dark)
        self._history.add(load, utc_now())
        if self._history.samples:
            replace_chart(self._throughput, self._history.throughput(self._endpoint, colours))
            replace_chart(self._latency, self._history.latency(self._endpoint, colours))
