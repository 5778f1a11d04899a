"""Monitoring on the command line, on a training set of the feature store."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from command_line import CommandLine, command_line
from falaj.monitoring.windows.collector import Collector
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from platforms import OwnPlatform, make_platform

if TYPE_CHECKING:
    from conftest import MakeEndpoint

NOON = datetime(2024, 6, 1, 12, tzinfo=UTC)
RNG = np.random.default_rng(3)
TRIPS = FeatureView(name="trips", entities=("driver",), columns=(Feature(name="km", type=ColumnType.FLOAT),))


@pytest.fixture
def home(tmp_path: Path, make_endpoint: MakeEndpoint) -> Path:
    """A home with the training set `flights` and the endpoint `delay`."""
    with make_platform(tmp_path) as platform:
        drivers = [f"d{number}" for number in range(1000)]
        early, late = [NOON] * 1000, [NOON + timedelta(hours=1)] * 1000
        platform.features.apply(entities=(Entity(name="driver", key="driver"),), views=(TRIPS,))
        trips = pa.table({"driver": drivers, "event_time": early, "km": RNG.normal(size=1000)})
        platform.features.ingest("trips", data=put(platform, "trips.arrow", trips))
        spine = put(platform, "spine.arrow", pa.table({"driver": drivers, "event_time": late}))
        platform.features.training_set("flights", spine=spine, views=("trips",))
        make_endpoint(platform, "delay")
    return tmp_path


@pytest.fixture
def falaj(home: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(home, capsys) as line:
        yield line


def put(platform: OwnPlatform, name: str, rows: pa.Table) -> str:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return str(platform.put(name, sink.getvalue().to_pybytes()).id)


def serve(folder: Path, rows: np.ndarray) -> None:
    with make_platform(folder) as platform:
        collector = Collector(clock=platform.clock)
        collector.add("delay", "flights@1", {"trips__km": rows})
        platform.clock.advance(timedelta(seconds=10))
        with platform.as_controller():
            for endpoint, window in collector.flush():
                platform.monitoring.record(endpoint, windows=(window,))
            platform.monitoring.evaluate()


@pytest.mark.slow
def test_an_endpoint_is_monitored_and_its_drift_is_shown(falaj: CommandLine) -> None:
    watched = falaj.done("monitoring", "watch", "delay", "--reference", "flights", "--rows", "200")
    assert watched.out.startswith(
        "delay compares delay with flights: 1000 rows, all columns that both have\n"
    )
    assert "falaj monitoring check delay" in watched.out
    assert "no windows were received" in falaj.done("monitoring", "check", "delay").out

    serve(falaj.folder, RNG.normal(2, 1, 300))

    output = falaj.done("monitoring", "check", "delay").out
    assert output.splitlines()[0] == "flights@1: 1 of 1 columns drift: trips__km"
    assert "trips__km  drift" in output
    (alert,) = falaj.json("monitoring", "alerts")["items"]
    assert "trips__km" in falaj.done("monitoring", "alerts").out
    assert falaj.json("monitoring", "alert", alert["id"])["report"]["verdict"] == "drift"
    assert falaj.json("monitoring", "acknowledge", alert["id"])["state"] == "acknowledged"
    assert "delay" in falaj.done("monitoring", "list").out
    assert falaj.json("monitoring", "remove", "delay", "--yes")["monitor"] == alert["monitor"]


BAD: list[tuple[tuple[str, ...], str]] = [
    (("watch", "nowhere", "--reference", "flights"), "there is no endpoint 'nowhere'"),
    (("watch", "delay", "--reference", "nothing"), "there is no dataset 'nothing'"),
    (("watch", "delay", "--reference", "flights", "--column", "miles"), "trips__km"),
    (("watch", "delay", "--reference", "flights", "--rows", "0"), "--rows or --every"),
    (("watch", "delay", "--reference", "flights", "--rows", "many"), "--rows or --every"),
    (("watch", "delay", "--reference", "flights", "--every", "soon"), "--every"),
    (("check", "delay"), "there is no monitor 'delay'"),
    (("check", "delay", "--since", "yesterday"), "--since"),
    (("acknowledge", "alert_1"), "there is no alert 'alert_1'"),
]


@pytest.mark.slow
def test_bad_input_is_refused_with_a_message(falaj: CommandLine) -> None:
    for typed, words in BAD:
        ran = falaj("monitoring", *typed)

        assert ran.status in (1, 2), typed
        assert words in ran.err

    assert falaj.json("monitoring", "list")["items"] == []
