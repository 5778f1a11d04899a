"""The server side of monitoring: bounded sketching, and delivery of every window once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from falaj.errors import NotFound, Unavailable
from falaj.governance.operations.caller import current_terms
from falaj.governance.operations.operation import operations_of
from falaj.monitoring.service import Monitoring
from falaj.monitoring.sketches.reading import read_points
from falaj.monitoring.tables import slots
from falaj.monitoring.windows.collector import COLUMNS_LIMIT, Collector, ServedWindow
from falaj.monitoring.windows.delivery import Delivery, split_window
from falaj.records.monitoring.monitors import MonitorWindow, WindowRecord
from falaj.records.monitoring.sketches import ColumnKind, ColumnRole
from platforms import Clock
from polling import eventually

if TYPE_CHECKING:
    from conftest import MonitoringEnv


class Platform:
    """Accepts windows, or does not answer; like the gate, it counts a key once."""

    def __init__(self) -> None:
        self.answers = True
        self.breaks_after_taking = False
        self.taken: dict[str, tuple[str, WindowRecord]] = {}

    def __call__(self, endpoint: str, windows: tuple[WindowRecord, ...]) -> None:
        if not self.answers:
            raise Unavailable("no answer")
        self.taken[str(current_terms().key)] = (endpoint, windows[0])
        if self.breaks_after_taking:
            raise Unavailable("the connection broke")

    @property
    def rows(self) -> int:
        return sum(window.rows for _, window in self.taken.values())


def only(found: list[ServedWindow]) -> WindowRecord:
    (served,) = found
    return served.window


def columns_of(window: WindowRecord) -> dict[str, Any]:
    return {sketch.name: sketch for sketch in window.features}


# ------------------------------------------------------------------------------------------- collecting


def test_batches_become_one_window_with_exact_counts() -> None:
    rng, clock = np.random.default_rng(1), Clock()
    collector, start = Collector(clock=clock), clock()
    batches = [rng.normal(size=7) for _ in range(100)]
    for batch in batches:
        batch[0] = np.nan
        collector.add("delay", "3", {"km": batch, "late": np.array([b"yes", b"no"] * 3 + [b"no"], object)})
        collector.add("delay", "3", {"score": batch[:, None].astype(np.float32)}, role=ColumnRole.PREDICTION)

    window = only(collector.flush())

    found = columns_of(window)
    assert (window.model, window.rows, window.since) == ("3", 700, start)
    assert (found["km"].count, found["km"].nulls) == (600, 100)
    assert found["km"].maximum == max(np.nanmax(batch) for batch in batches)
    assert found["late"].categories == {"yes": 300, "no": 400}
    assert (found["score"].role, found["score"].rows) == (ColumnRole.PREDICTION, 700)
    assert collector.flush() == []


def test_a_matrix_is_sketched_by_column() -> None:
    collector = Collector()
    for number in range(5):
        collector.add("delay", "3", {"x": np.array([[number, 10.0, -number]], np.float32)})
    collector.add("delay", "3", {"image": np.zeros((2, 4, 4))})

    found = columns_of(only(collector.flush()))

    assert [(name, sketch.minimum, sketch.maximum) for name, sketch in found.items()] == [
        ("x[0]", 0, 4),
        ("x[1]", 10, 10),
        ("x[2]", -4, 0),
    ]


def test_values_that_cannot_be_sketched_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector()
    collector.add("delay", "3", {"km": np.ones(3), "odd": np.array([{}, [], 3], object)})
    collector.add("delay", "3", {"km": np.array(["a", "b", "c"])})
    collector.add("delay", "3", {})
    for _ in range(2):
        collector.add("delay", "3", {"scalar": np.float64(1)})  # type: ignore[dict-item]
    collector.add("wide", "1", {"x": np.zeros((2, COLUMNS_LIMIT + 50))})

    delay, wide = (served.window for served in collector.flush())

    assert [(sketch.name, sketch.rows) for sketch in delay.features] == [("km", 3)]
    assert len(wide.features) == COLUMNS_LIMIT
    assert {record.column for record in caplog.records} >= {"odd", "km", "scalar"}  # type: ignore[attr-defined]


def test_pending_values_are_bounded() -> None:
    collector = Collector(pending_values=1000)
    for _ in range(1000):
        collector.add("delay", "3", {"a": np.ones(10), "b": np.ones(10)})
        assert collector._versions["delay", "3"].values < 1000

    assert only(collector.flush()).rows == 10_000


def test_threads_lose_no_row() -> None:
    collector, total, done = Collector(pending_values=500), 0, threading.Event()

    def serve() -> None:
        for _ in range(500):
            collector.add("delay", "3", {"x": np.arange(4.0)})

    def cut() -> None:
        nonlocal total
        while not done.is_set():
            total += sum(served.window.rows for served in collector.flush())

    servers = [threading.Thread(target=serve) for _ in range(4)]
    cutter = threading.Thread(target=cut)
    for thread in (cutter, *servers):
        thread.start()
    for thread in servers:
        thread.join()
    done.set()
    cutter.join()

    assert total + sum(served.window.rows for served in collector.flush()) == 4 * 500 * 4


# ------------------------------------------------------------------------------------------- delivering


def test_windows_are_delivered_and_the_last_one_on_stop() -> None:
    collector, platform = Collector(), Platform()
    delivery = Delivery(collector, platform, every_s=0.05, sketch_every_s=0.01)
    delivery.start()
    collector.add("delay", "3", {"x": np.ones(5)})
    eventually(lambda: platform.rows == 5)
    collector.add("delay", "3", {"x": np.ones(6)})

    delivery.stop()

    assert (platform.rows, delivery.waiting) == (11, 0)


def test_windows_are_merged_and_none_is_lost_during_an_outage() -> None:
    collector, platform = Collector(), Platform()
    delivery = Delivery(collector, platform, waiting_limit=6)
    platform.answers = False
    for number in range(50):
        for version in ("3", "4"):
            collector.add("delay", version, {"x": np.full(10, float(number))})
        delivery.deliver()
        assert delivery.waiting <= 6

    platform.answers = True
    delivery.deliver()

    per_version = {"3": 0, "4": 0}
    for _, window in platform.taken.values():
        per_version[window.model] += window.rows
        assert read_points(window.features[0]).count == window.rows
    assert per_version == {"3": 500, "4": 500}
    assert len(platform.taken) == 6


def test_a_window_whose_answer_was_lost_counts_once() -> None:
    collector, platform = Collector(), Platform()
    delivery = Delivery(collector, platform, waiting_limit=2)
    platform.breaks_after_taking = True
    for _ in range(5):
        collector.add("delay", "3", {"x": np.ones(10)})
        delivery.deliver()
    assert (delivery.waiting, platform.rows) == (2, 10)

    platform.breaks_after_taking = False
    delivery.deliver()

    assert (delivery.waiting, platform.rows) == (0, 50)


def test_a_window_of_a_removed_endpoint_does_not_stop_the_others() -> None:
    collector, taken = Collector(), []

    def deliver(endpoint: str, windows: tuple[WindowRecord, ...]) -> None:
        if endpoint == "gone":
            raise NotFound("there is no endpoint 'gone'")
        taken.append(endpoint)

    collector.add("gone", "1", {"x": np.ones(10)})
    collector.add("delay", "1", {"x": np.ones(10)})

    delivery = Delivery(collector, deliver)
    delivery.deliver()

    assert (taken, delivery.waiting) == (["delay"], 0)


def test_a_wide_window_travels_in_parts_that_fit(light_env: MonitoringEnv) -> None:
    rng, record = light_env.rng, operations_of(Monitoring)["record"]
    rows = {f"c{number}": rng.normal(size=5000) for number in range(80)}
    rows["c0"][0] = np.inf
    light_env.watched({name: values[:500] for name, values in rows.items()}, window=MonitorWindow(rows=5000))

    parts = list(split_window(light_env.serve(rows)))
    for part in parts:
        body = (
            record.input.model_validate({"endpoint": "delay", "windows": (part,)}).model_dump_json().encode()
        )
        assert len(body) < 2**20
        light_env.service.record("delay", windows=record.check_json(body).windows)  # type: ignore[attr-defined]

    assert len(parts) > 1
    assert [part.rows for part in parts] == [5000] + [0] * (len(parts) - 1)
    assert light_env.service.evaluate().windows == 1
    (progress,) = light_env.service.show("delay").versions
    assert (progress.rows, progress.waiting_rows) == (5000, 0)
    assert light_env.platform.count(slots) == len(parts)
    (look,) = light_env.service.check("delay").looks
    assert len(look.reports) == 80
    assert {report.kind for report in look.reports} == {ColumnKind.NUMERIC}


def test_deliveries_to_the_service_count_once_through_the_gate(env: MonitoringEnv) -> None:
    env.watched({"x": env.rng.normal(size=2000)})
    collector, breaks = Collector(clock=env.platform.clock), True

    def deliver(endpoint: str, windows: tuple[WindowRecord, ...]) -> None:
        env.service.record(endpoint, windows=windows)
        if breaks:
            raise Unavailable("the connection broke")

    delivery = Delivery(collector, deliver)
    for _ in range(3):
        collector.add("delay", "3", {"x": env.rng.normal(size=100)})
        delivery.deliver()
    breaks = False
    delivery.deliver()

    assert env.service.show("delay").versions[0].waiting_rows == 300
