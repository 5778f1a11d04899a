"""Files of killed writes and queries are removed once they are old; what is published or in use stays."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from falaj.drivers.duckdb.queries import DuckDbQueryEngine
from falaj.errors import Conflict
from falaj.features.table_versions import files as table_files
from falaj.features.views import stored_rows
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from polling import PATIENCE_S, let_pass

if TYPE_CHECKING:
    from conftest import FeaturesEnv

MOMENT = pa.timestamp("us", "UTC")
DRIVER = Entity(name="driver", key="driver", type=ColumnType.INTEGER)
TRIPS = FeatureView(
    name="trips", entities=("driver",), columns=(Feature(name="km", type=ColumnType.FLOAT),), event_time="at"
)
DAYS = timedelta(days=3)


class Killed(BaseException):
    """Stands for SIGKILL: nobody handles it."""


def trips(*numbers: int) -> pa.Table:
    return pa.table(
        {"driver": numbers, "at": pa.array(numbers, MOMENT), "km": [float(number) for number in numbers]}
    )


def spine() -> pa.Table:
    return pa.table({"driver": [1], "event_time": pa.array([9], MOMENT)})


def parquet_files(env: FeaturesEnv) -> set[str]:
    return {path.name for path in (env.folder / "tables").rglob("*.parquet*")}


def kill_before_commit(env: FeaturesEnv, work: Callable[[], Any]) -> None:
    """Do `work` up to the transaction that publishes it."""

    def killed(*_: Any) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env.platform.parts.gate, "commit", killed)
        with pytest.raises(Killed):
            work()


@pytest.fixture
def stored(env: FeaturesEnv) -> FeaturesEnv:
    env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    env.features.ingest("trips", data=env.put("one", trips(1, 2)))
    env.features.training_set("set", spine=env.put("spine", spine()), views=("trips",))
    return env


@pytest.mark.slow
def test_what_killed_writes_left_is_removed_once_it_is_old(stored: FeaturesEnv) -> None:
    features, published = stored.features, parquet_files(stored)
    more, spine_id = stored.put("more", trips(3)), stored.put("spine2", spine())
    kill_before_commit(stored, lambda: features.ingest("trips", data=more))
    kill_before_commit(stored, lambda: features.training_set("lost", spine=spine_id, views=("trips",)))
    (table,) = {path.parent for path in (stored.folder / "tables").rglob("*/*/1/part-*")}
    (table / "part-00000-half.parquet#1").write_bytes(b"PAR1 plain text")
    assert len(parquet_files(stored)) == len(published) + 3

    young = features.cleanup()
    stored.platform.clock.advance(DAYS)
    old = features.cleanup()

    assert (young.files, old.files) == (0, 3)
    assert parquet_files(stored) == published
    assert len(list((stored.folder / "tables").rglob("_delta_log"))) == 2
    assert features.scan("trips").read_all().num_rows == 2
    assert features.load("set").read_all().num_rows == 1
    assert features.ingest("trips", data=more).rows == features.scan("trips").read_all().num_rows == 3


@pytest.mark.slow
def test_a_killed_first_ingestion_is_removed_too(stored: FeaturesEnv) -> None:
    stored.features.apply(entities=(DRIVER,), views=(TRIPS.model_copy(update={"name": "later"}),))
    data = stored.put("first", trips(1))
    kill_before_commit(stored, lambda: stored.features.ingest("later", data=data))
    stored.platform.clock.advance(DAYS)

    assert stored.features.cleanup().files == 1

    assert stored.features.ingest("later", data=data).rows == 1
    assert stored.features.scan("later").read_all().num_rows == 1


@pytest.mark.slow
@pytest.mark.parametrize("look", [1, 2])
def test_a_cleanup_that_meets_an_ingestion_takes_nothing_that_was_acknowledged(
    stored: FeaturesEnv, monkeypatch: pytest.MonkeyPatch, look: int
) -> None:
    platform, other = stored.platform, stored.platform.again()
    written, looked, looks = threading.Event(), threading.Event(), list[int]()
    data, commit, unused = stored.put("more", trips(3)), other.parts.gate.commit, table_files.unused
    platform.clock.advance(DAYS)  # the files look old as soon as they are written

    def commit_later(*args: Any) -> Any:
        written.set()
        looked.wait(PATIENCE_S)
        return commit(*args)

    def look_and_let_in(*args: Any, **options: Any) -> Any:
        found = unused(*args, **options)
        if threading.current_thread() is threading.main_thread():
            looks.append(1)
            if len(looks) == look:
                looked.set()
                let_pass(0.3)
        return found

    monkeypatch.setattr(other.parts.gate, "commit", commit_later)
    monkeypatch.setattr(table_files, "unused", look_and_let_in)
    with ThreadPoolExecutor(1) as beside:
        ingestion = beside.submit(other.features.ingest, "trips", data=data)
        assert written.wait(PATIENCE_S)
        platform.features.cleanup()
        looked.set()
        failure = ingestion.exception(PATIENCE_S)

    assert failure is None or isinstance(failure, Conflict)
    rows = platform.features.scan("trips").read_all().num_rows
    assert rows == platform.features.show("trips").rows == (3 if failure is None else 2)


@pytest.mark.slow
def test_merged_files_are_removed_when_no_version_that_is_read_has_them(stored: FeaturesEnv) -> None:
    features, first = stored.features, parquet_files(stored)  # the set was made from it
    for number in range(40):
        if number == 20:
            features.materialize("trips")
        features.ingest("trips", data=stored.put(f"more-{number}", trips(10 + number)))
    stored.platform.clock.advance(DAYS)  # the files are old, but so are those that replaced them
    before = parquet_files(stored)

    removed = features.cleanup().files

    left = parquet_files(stored)
    assert (removed, len(before) - len(left)) == (len(before - left), removed)
    assert 0 < removed < 40
    assert left >= first
    rows = features.scan("trips").read_all()
    assert sorted(rows["driver"].to_pylist()) == [1, 2, *range(10, 50)]
    online, pinned = features.show("trips").online_version, features.training_sets().items[0].views[0]
    assert pinned.table_version == 0
    assert online is not None
    for number, count in ((online, 22), (pinned.table_version, 2)):
        view = features.show("trips").model_copy(update={"table_version": number})
        assert len(stored_rows(features.backends, view).to_table()) == count
    assert features.cleanup().files == 0


@pytest.mark.slow
def test_files_that_were_merged_just_now_are_kept(stored: FeaturesEnv) -> None:
    for number in range(20):
        stored.features.ingest("trips", data=stored.put(f"more-{number}", trips(10 + number)))
    before = parquet_files(stored)

    assert stored.features.cleanup().files == 0
    assert parquet_files(stored) == before


@pytest.fixture
def spill(tmp_path: Path) -> Path:
    folder = tmp_path / "spill"
    for name, age_s in (("old", 7200), ("running", 60)):
        (folder / name).mkdir(parents=True)
        (folder / name / "duckdb_temp_storage-0.tmp").write_bytes(b"plain text")
        for path in (folder / name / "duckdb_temp_storage-0.tmp", folder / name):
            os.utime(path, (time.time() - age_s,) * 2)
    return folder


def test_what_a_killed_query_spilled_is_removed_and_a_running_one_keeps_its_folder(spill: Path) -> None:
    engine = DuckDbQueryEngine(spill=spill)  # the first use in a process

    assert {path.name for path in spill.iterdir()} == {"running"}
    os.utime(spill / "running", (time.time() - 7200,) * 2)  # but not the file in it
    assert engine.select("SELECT 1 AS n", {})["n"].to_pylist() == [1]
    assert {path.name for path in spill.iterdir()} == {"running"}


def test_the_operation_removes_spilled_folders(light_env: FeaturesEnv) -> None:
    light_env.features.backends.queries.select("SELECT 1", {})
    left = light_env.folder / "spill" / "tmp_killed"
    left.mkdir(parents=True)
    os.utime(left, (time.time() - 7200,) * 2)

    light_env.platform.clock.advance(DAYS)

    assert light_env.features.cleanup().spilled == 1
    assert not left.exists()
