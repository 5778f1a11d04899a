"""What was acknowledged is on disk: a power cut right afterwards loses nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import falaj as fj
from falaj.drivers.deltalake.tables import DeltaTables
from falaj.ports.tables import TableKey
from power_cuts import recorded_disk

MOMENT = pa.timestamp("us", "UTC")
UNSEEN = ("*.db", "*.db-*", "lock", "logs", "spill", ".queues")
"""What SQLite flushes below Python, and what nobody needs after a power cut."""


def trips(*numbers: int, at: int = 0) -> pa.Table:
    times = pa.array([at + number for number in numbers], MOMENT)
    return pa.table({"driver": numbers, "event_time": times, "km": [float(number) for number in numbers]})


def ingest_once(platform: Any) -> None:
    platform.ingest("trips", trips(1, 2, 3))


def ingest_late_rows(platform: Any) -> None:
    platform.ingest("trips", trips(1, 2, 3, at=1000))
    platform.ingest("trips", trips(4, 5, at=2000))
    platform.ingest("trips", trips(1, 2))


def build_training_set(platform: Any) -> None:
    platform.ingest("trips", trips(1, 2, 3))
    spine = pa.table({"driver": [1, 3], "event_time": pa.array([10, 10], MOMENT)})
    platform.training_set("set", spine=spine, views=["trips"])


@pytest.mark.slow
@pytest.mark.parametrize("work", [ingest_once, ingest_late_rows, build_training_set])
def test_nothing_acknowledged_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Any) -> None:
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    home = tmp_path / "home"
    with recorded_disk() as disk, fj.open(home) as platform:
        platform.apply(
            [
                fj.Entity(name="driver", key="driver", type="integer"),
                fj.FeatureView(
                    name="trips", entities=("driver",), columns=(fj.Feature(name="km", type="float"),)
                ),
            ]
        )
        work(platform)
        shown = platform.features.show("trips")
        scanned = platform.features.scan("trips").read_all()
        sets = [
            platform.features.load(each.id).read_all() for each in platform.features.training_sets().items
        ]

    assert disk.cut_power(home, spare=UNSEEN) == []
    with fj.open(home) as platform:
        assert platform.features.show("trips") == shown
        assert platform.features.scan("trips").read_all() == scanned
        again = [
            platform.features.load(each.id).read_all() for each in platform.features.training_sets().items
        ]
        assert again == sets
        assert scanned.num_rows == shown.rows
        assert platform.ingest("trips", trips(9)).rows == shown.rows + 1


def test_the_witness_and_the_key_are_there_after_the_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A witness that is lost with the power would look like one that was removed."""
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    with recorded_disk() as disk, fj.open(tmp_path / "home"):
        pass

    assert disk.cut_power(tmp_path / "config", spare=UNSEEN) == []


def test_a_folder_that_a_killed_writer_made_is_flushed_by_the_next(tmp_path: Path) -> None:
    table, root = TableKey("default/trips/1"), tmp_path / "tables"
    (root / table).mkdir(parents=True)

    with recorded_disk() as disk:
        version = DeltaTables(root).overwrite(table, pa.table({"n": [0]}))

    assert disk.cut_power(root) == []
    assert DeltaTables(root).read(table, version=version).to_table()["n"].to_pylist() == [0]


@pytest.mark.slow
def test_the_flushed_log_can_be_appended_to_beyond_a_checkpoint(tmp_path: Path) -> None:
    table, root = TableKey("default/trips/1"), tmp_path / "tables"
    with recorded_disk() as disk:
        store = DeltaTables(root)
        version = store.overwrite(table, pa.table({"n": [0]}))
        for number in range(1, 103):
            version = store.append(table, pa.table({"n": [number]}), onto=version)

    assert disk.cut_power(root) == []
    assert (root / table / "_delta_log" / "_last_checkpoint").exists()
    reopened = DeltaTables(root)
    version = reopened.append(table, pa.table({"n": [103]}), onto=version)
    assert sorted(reopened.read(table, version=version).to_table()["n"].to_pylist()) == list(range(104))
    reopened.check(table, version=version)


def test_a_log_that_a_killed_writer_left_is_flushed_with_the_next_version(tmp_path: Path) -> None:
    table, root = TableKey("default/trips/1"), tmp_path / "tables"
    with recorded_disk() as disk:
        store = DeltaTables(root)
        published = store.overwrite(table, pa.table({"n": [0]}))
    store.append(table, pa.table({"n": [666]}), onto=published)  # its flushes are not seen
    with recorded_disk() as after:
        version = store.append(table, pa.table({"n": [1]}), onto=published)
    disk.files |= after.files
    disk.entries |= after.entries

    disk.cut_power(root)

    reopened = DeltaTables(root)
    assert reopened.read(table, version=version).to_table()["n"].to_pylist() == [0, 1]
    assert reopened.append(table, pa.table({"n": [2]}), onto=version).number > version.number
