"""What every TableStore keeps to."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from falaj.drivers.deltalake.tables import DeltaTables
from falaj.errors import Conflict, NotFound
from falaj.ports.tables import TableKey, TableStore

TRIPS = TableKey("default/trips/1")


@pytest.fixture
def store(tmp_path: Path) -> TableStore:
    return DeltaTables(tmp_path / "tables")


def rows(*numbers: int) -> pa.Table:
    return pa.table({"n": pa.array(numbers, pa.int64())})


def numbers(store: TableStore, version: int, table: TableKey = TRIPS) -> list[int]:
    found: list[int] = store.read(table, version=version).to_table()["n"].to_pylist()
    return sorted(found)


def test_rows_come_back_as_they_were(store: TableStore) -> None:
    moment = pa.array([1, None], pa.timestamp("us", "UTC"))
    given = pa.table({"t": moment, "x": [0.5, None], "s": ["a", None], "b": [True, None], "i": [1, None]})

    version = store.overwrite(TRIPS, given)

    assert store.read(TRIPS, version=version).to_table().equals(given)


def test_every_version_stays_readable(store: TableStore) -> None:
    first = store.overwrite(TRIPS, rows(1))
    second = store.append(TRIPS, rows(2), onto=first)
    third = store.overwrite(TRIPS, rows(3))

    assert [numbers(store, version) for version in (first, second, third)] == [[1], [1, 2], [3]]


def test_what_was_never_published_is_left_out(store: TableStore) -> None:
    published = store.overwrite(TRIPS, rows(1))
    store.append(TRIPS, rows(666), onto=published)

    version = store.append(TRIPS, rows(2), onto=published)

    assert numbers(store, version) == [1, 2]


def test_a_reader_is_taken(store: TableStore) -> None:
    batches = pa.RecordBatchReader.from_batches(rows(1, 2).schema, rows(1, 2).to_batches())

    assert numbers(store, store.overwrite(TRIPS, batches)) == [1, 2]


def test_no_rows_are_a_version_too(store: TableStore) -> None:
    assert numbers(store, store.overwrite(TRIPS, rows())) == []


def test_a_table_may_change_its_columns_when_it_is_overwritten(store: TableStore) -> None:
    first = store.overwrite(TRIPS, rows(1))
    second = store.overwrite(TRIPS, pa.table({"other": ["x"]}))

    assert numbers(store, first) == [1]
    assert store.read(TRIPS, version=second).to_table().to_pydict() == {"other": ["x"]}


def test_writers_at_once_get_the_version_with_their_own_rows(store: TableStore) -> None:
    store.overwrite(TRIPS, rows(0))

    def write(number: int) -> tuple[int, int | None]:
        try:
            return number, store.overwrite(TRIPS, rows(number))
        except Conflict:
            return number, None

    with ThreadPoolExecutor(4) as pool:
        written = list(pool.map(write, range(1, 13)))

    assert any(version is not None for _, version in written)
    assert all(numbers(store, version) == [number] for number, version in written if version is not None)


def test_tables_do_not_mix(store: TableStore) -> None:
    other = TableKey("default/other/1")
    version = store.overwrite(TRIPS, rows(1))
    store.overwrite(other, rows(2))

    store.delete(other)

    assert numbers(store, version) == [1]
    with pytest.raises(NotFound):
        store.read(other, version=0)


def test_unknown_tables_and_versions_are_not_found(store: TableStore) -> None:
    version = store.overwrite(TRIPS, rows(1))

    with pytest.raises(NotFound):
        store.read(TableKey("default/none/1"), version=0)
    with pytest.raises(NotFound):
        store.read(TRIPS, version=version + 1)
    with pytest.raises(NotFound):
        store.append(TableKey("default/none/1"), rows(1), onto=0)


def test_deleting_what_is_not_there_does_nothing(store: TableStore) -> None:
    store.delete(TableKey("default/none/1"))
