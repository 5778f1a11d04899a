"""Bytes that changed on disk are refused with the file and the way to repair, and never read as other values."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from falaj.drivers.deltalake.tables import DeltaTables
from falaj.errors import Damaged
from falaj.ports.tables import TableKey
from falaj.records.features import ColumnType, Entity, Feature, FeatureView

if TYPE_CHECKING:
    from conftest import FeaturesEnv

MOMENT = pa.timestamp("us", "UTC")
DRIVER = Entity(name="driver", key="driver", type=ColumnType.INTEGER)
TRIPS = FeatureView(
    name="trips", entities=("driver",), columns=(Feature(name="km", type=ColumnType.FLOAT),), event_time="at"
)


def trips(*numbers: int) -> pa.Table:
    return pa.table(
        {"driver": numbers, "at": pa.array(numbers, MOMENT), "km": [number * 1.5 for number in numbers]}
    )


@pytest.fixture
def stored(light_env: FeaturesEnv) -> FeaturesEnv:
    """A view with two ingestions, and a training set."""
    features = light_env.features
    features.apply(entities=(DRIVER,), views=(TRIPS,))
    features.ingest("trips", data=light_env.put("one", trips(*range(100))))
    features.ingest("trips", data=light_env.put("two", trips(*range(100, 200))))
    spine = pa.table({"driver": range(200), "event_time": pa.array(range(200, 400), MOMENT)})
    features.training_set("set", spine=light_env.put("spine", spine), views=("trips",))
    return light_env


def parquet_files(env: FeaturesEnv) -> list[Path]:
    return sorted((env.folder / "tables").rglob("part-*.parquet"))


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << position % 8
    file.write_bytes(content)


def read_everything(env: FeaturesEnv) -> None:
    env.features.scan("trips").read_all()
    env.features.load("set").read_all()


@pytest.mark.slow
def test_any_flipped_byte_of_a_table_is_refused(stored: FeaturesEnv) -> None:
    chance = random.Random(7)
    files = parquet_files(stored)
    assert len(files) == 3

    for file in files:
        sound = file.read_bytes()
        for position in chance.sample(range(len(sound)), 40):
            flip(file, position)
            with pytest.raises(Damaged) as caught:
                read_everything(stored)
            assert file.name in str(caught.value)
            file.write_bytes(sound)

    assert stored.features.scan("trips").read_all().num_rows == 200
    assert stored.features.load("set").read_all().num_rows == 200


def test_damage_reaches_no_join_and_no_online_value(stored: FeaturesEnv) -> None:
    view = next(file for file in parquet_files(stored) if file.parent.name == "1")
    flip(view, view.stat().st_size // 2)

    with pytest.raises(Damaged):
        stored.features.materialize("trips")
    with pytest.raises(Damaged):
        stored.features.training_set("more", spine="view:trips", views=("trips",))


def test_a_changed_log_changes_no_rows(stored: FeaturesEnv) -> None:
    before = stored.features.scan("trips").read_all()

    for entry in (stored.folder / "tables").rglob("_delta_log/*.json"):
        entry.write_text(entry.read_text().replace("km", "kn"))

    assert stored.features.scan("trips").read_all() == before


def test_a_table_whose_files_are_no_longer_recorded_is_damaged(stored: FeaturesEnv) -> None:
    stored.platform.sql("DELETE FROM features_table_files")

    with pytest.raises(Damaged, match="not recorded"):
        stored.features.scan("trips")


@pytest.mark.parametrize(("share", "is_found"), [(1.0, True), (0.0, False)])
def test_a_sample_of_reads_hashes_files_that_look_unchanged(
    tmp_path: Path, share: float, is_found: bool
) -> None:
    store, table = DeltaTables(tmp_path, recheck_share=share), TableKey("default/trips/1")
    version = store.overwrite(table, trips(1, 2, 3))
    hashed = list[Path]()
    real = store._hashes.hash
    store._hashes.hash = lambda path: hashed.append(path) or real(path)  # type: ignore[method-assign,func-returns-value]

    store.read(table, version=version)

    assert bool(hashed) is is_found
