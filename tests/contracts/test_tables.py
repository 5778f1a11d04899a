"""The TableStore contract."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pytest

from falaj.drivers.deltalake.tables import DeltaTables
from falaj.errors import Conflict, Damaged, NotFound, Unavailable
from falaj.ports.tables import TableFile, TableKey, TableStore, TableVersion
from polling import eventually, let_pass

TRIPS = TableKey("default/trips/1")


@pytest.fixture
def store(tmp_path: Path) -> TableStore:
    return DeltaTables(tmp_path / "tables")


def rows(*numbers: int) -> pa.Table:
    return pa.table({"n": pa.array(numbers, pa.int64())})


def numbers(store: TableStore, version: TableVersion, table: TableKey = TRIPS) -> list[int]:
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


def test_unpublished_rows_are_left_out(store: TableStore) -> None:
    published = store.overwrite(TRIPS, rows(1))
    store.append(TRIPS, rows(666), onto=published)

    version = store.append(TRIPS, rows(2), onto=published)

    assert numbers(store, version) == [1, 2]


def test_a_record_batch_reader_is_accepted(store: TableStore) -> None:
    batches = pa.RecordBatchReader.from_batches(rows(1, 2).schema, rows(1, 2).to_batches())

    assert numbers(store, store.overwrite(TRIPS, batches)) == [1, 2]


def test_an_empty_write_makes_a_version(store: TableStore) -> None:
    assert numbers(store, store.overwrite(TRIPS, rows())) == []


def test_a_table_may_change_its_columns_when_it_is_overwritten(store: TableStore) -> None:
    first = store.overwrite(TRIPS, rows(1))
    second = store.overwrite(TRIPS, pa.table({"other": ["x"]}))

    assert numbers(store, first) == [1]
    assert store.read(TRIPS, version=second).to_table().to_pydict() == {"other": ["x"]}


def test_concurrent_writers_get_the_version_with_their_own_rows(store: TableStore) -> None:
    store.overwrite(TRIPS, rows(0))

    def write(number: int) -> tuple[int, TableVersion | None]:
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
        store.read(other, version=TableVersion(0, ()))


def test_unknown_tables_and_versions_are_not_found(store: TableStore) -> None:
    version = store.overwrite(TRIPS, rows(1))

    with pytest.raises(NotFound):
        store.read(TableKey("default/none/1"), version=TableVersion(0, ()))
    with pytest.raises(NotFound):
        store.read(TRIPS, version=TableVersion(version.number + 1, ()))
    with pytest.raises(NotFound):
        store.append(TableKey("default/none/1"), rows(1), onto=version)


def test_deleting_a_missing_table_does_nothing(store: TableStore) -> None:
    store.delete(TableKey("default/none/1"))


def test_a_version_names_its_files_with_their_hashes(store: TableStore, tmp_path: Path) -> None:
    first = store.overwrite(TRIPS, rows(1))

    second = store.append(TRIPS, rows(2), onto=first)

    found = [tmp_path / "tables" / TRIPS / file.path for file in second.files]
    assert [file.sha256 for file in second.files] == [sha256(path.read_bytes()).hexdigest() for path in found]
    assert [file.size_bytes for file in second.files] == [path.stat().st_size for path in found]
    assert second.files[:1] == first.files
    assert first.digest != second.digest


def test_the_digest_does_not_depend_on_the_order_of_files() -> None:
    one, two = TableFile("a", 1, "0" * 64), TableFile("b", 2, "f" * 64)

    assert TableVersion(1, (one, two)).digest == TableVersion(2, (two, one)).digest
    assert TableVersion(1, (one,)).digest == sha256(f"{'0' * 64} 1 a\n".encode()).hexdigest()


def test_a_changed_file_is_damaged(store: TableStore, tmp_path: Path) -> None:
    version = store.overwrite(TRIPS, rows(1, 2, 3))
    assert numbers(store, version) == [1, 2, 3]
    file = tmp_path / "tables" / TRIPS / version.files[0].path
    before = file.stat()

    flip(file, before.st_size // 2)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    with pytest.raises(Damaged) as caught:
        store.read(TRIPS, version=version)
    assert caught.value.faults[0].where == f"{TRIPS}/{version.files[0].path}"
    assert "backup" in (caught.value.faults[0].fix or "")


@pytest.mark.parametrize("harm", [lambda file: file.unlink(), lambda file: os.truncate(file, 10)])
def test_a_lost_or_cut_file_is_damaged(
    store: TableStore, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    version = store.append(TRIPS, rows(2), onto=store.overwrite(TRIPS, rows(1)))

    harm(tmp_path / "tables" / TRIPS / version.files[1].path)

    with pytest.raises(Damaged) as caught:
        store.read(TRIPS, version=version)
    assert [fault.where for fault in caught.value.faults] == [f"{TRIPS}/{version.files[1].path}"]


def test_rows_are_read_although_the_log_is_lost(store: TableStore, tmp_path: Path) -> None:
    version = store.append(TRIPS, rows(2), onto=store.overwrite(TRIPS, rows(1)))

    for entry in (tmp_path / "tables" / TRIPS / "_delta_log").iterdir():
        os.truncate(entry, 0)

    assert numbers(store, version) == [1, 2]
    with pytest.raises(Damaged):
        store.append(TRIPS, rows(3), onto=version)


def test_a_shorter_log_is_noticed_before_rows_are_added(store: TableStore, tmp_path: Path) -> None:
    version = store.append(TRIPS, rows(2), onto=store.overwrite(TRIPS, rows(1)))

    os.truncate(max((tmp_path / "tables" / TRIPS / "_delta_log").iterdir()), 0)

    with pytest.raises(Damaged):
        store.append(TRIPS, rows(3), onto=version)


def test_files_are_listed_and_removed_one_by_one(store: TableStore) -> None:
    published = store.overwrite(TRIPS, rows(1))
    lost = store.append(TRIPS, rows(666), onto=published)

    listed = list(store.list_files())
    store.delete_file(TRIPS, lost.files[1].path)

    assert {(file.table, file.path) for file in listed} == {(TRIPS, file.path) for file in lost.files}
    assert all(abs(datetime.now(UTC) - file.modified_at) < timedelta(minutes=1) for file in listed)
    assert store.has_files(TRIPS, version=published)
    assert not store.has_files(TRIPS, version=lost)
    assert numbers(store, store.append(TRIPS, rows(2), onto=published)) == [1, 2]


def flip(file: Path, position: int) -> None:
    with open(file, "r+b") as handle:
        handle.seek(position)
        byte = handle.read(1)[0]
        handle.seek(position)
        handle.write(bytes([byte ^ 0x10]))


# ---------------------------------------------------------------------------------------------- compaction


@pytest.mark.slow
def test_small_files_are_merged_and_earlier_versions_stay_readable(store: TableStore) -> None:
    versions = [store.overwrite(TRIPS, rows(0))]
    for number in range(1, 40):
        versions.append(store.append(TRIPS, rows(number), onto=versions[-1]))

    assert max(len(version.files) for version in versions) < 20
    assert [numbers(store, version) for version in versions] == [list(range(n + 1)) for n in range(40)]
    for version in versions:
        store.check(TRIPS, version=version)


@pytest.mark.slow
def test_large_files_between_small_ones_do_not_keep_them_apart(store: TableStore) -> None:
    version = store.overwrite(TRIPS, rows(0))
    for number in range(1, 40):
        given = rows(*range(1000 * number, 1000 * number + (9_000 if number % 2 else 1)))
        version = store.append(TRIPS, given, onto=version)

    assert len(version.files) < 20
    assert len(numbers(store, version)) == 1 + 20 * 9_000 + 19


@pytest.mark.slow
def test_an_unpublished_compaction_is_left_out(store: TableStore) -> None:
    version = store.overwrite(TRIPS, rows(0))
    while len((lost := store.append(TRIPS, rows(666), onto=version)).files) > len(version.files):
        version = store.append(TRIPS, rows(1), onto=version)

    again = store.append(TRIPS, rows(2), onto=version)

    assert len(lost.files) < len(version.files)
    assert numbers(store, again) == sorted([*numbers(store, version), 2])
    assert store.has_files(TRIPS, version=version)


def test_a_damaged_file_is_not_merged(store: TableStore, tmp_path: Path) -> None:
    version = store.overwrite(TRIPS, rows(0))
    file = tmp_path / "tables" / TRIPS / version.files[0].path
    flip(file, file.stat().st_size // 2)

    for number in range(1, 20):
        version = store.append(TRIPS, rows(number), onto=version)

    assert len(version.files) == 20
    with pytest.raises(Damaged):
        store.read(TRIPS, version=version)


# --------------------------------------------------------------------------------------------------- turns


HOLDER = """
import sys, time
from pathlib import Path
from falaj.drivers.deltalake.tables import DeltaTables
with DeltaTables(Path(sys.argv[1])).turn(sys.argv[2], wait_s=20):
    print("now", flush=True)
    time.sleep(600)
"""


def test_one_caller_at_a_time_has_the_turn(store: TableStore) -> None:
    inside, most = list[int](), list[int]()

    def enter(number: int) -> None:
        with store.turn(TRIPS, wait_s=20):
            inside.append(number)
            most.append(len(inside))
            let_pass(0.001)
            inside.remove(number)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(enter, range(24)))

    assert most == [1] * 24


def test_turns_are_given_in_the_order_of_arrival(store: TableStore, tmp_path: Path) -> None:
    order, waiting = list[int](), list[threading.Thread]()

    def enter(number: int) -> None:
        with store.turn(TRIPS, wait_s=20):
            order.append(number)

    with store.turn(TRIPS, wait_s=0):
        for number in range(8):
            waiting.append(threading.Thread(target=enter, args=(number,)))
            waiting[-1].start()
            eventually(lambda: len(tickets(tmp_path)) == len(waiting) + 1)
    for each in waiting:
        each.join()

    assert order == list(range(8))


def test_a_turn_that_does_not_come_is_refused_and_the_others_go_on(store: TableStore) -> None:
    with store.turn(TRIPS, wait_s=0):
        with pytest.raises(Unavailable, match="1 other is before this one"), store.turn(TRIPS, wait_s=0.02):
            pass
        with store.turn(TableKey("default/other/1"), wait_s=0):
            pass

    with store.turn(TRIPS, wait_s=0):
        pass


@pytest.mark.slow
def test_the_turn_of_a_killed_process_ends(store: TableStore, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "tables"), TRIPS]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(Unavailable), store.turn(TRIPS, wait_s=0.05):
            pass
        holder.kill()

    with store.turn(TRIPS, wait_s=5):
        assert len(tickets(tmp_path)) == 1
    assert tickets(tmp_path) == []


def tickets(folder: Path) -> list[Path]:
    return [path for path in (folder / "tables" / ".queues").rglob("*") if path.name.isdecimal()]
