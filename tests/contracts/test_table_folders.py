"""The contract of TableFolders: what a log says is what is read, and what is created is a table."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from falaj.drivers.deltalake.table_folders import DeltaFolders
from falaj.errors import InvalidInput
from falaj.ports.table_folders import TableFolders


@pytest.fixture
def folders() -> TableFolders:
    return DeltaFolders()


def rows(*numbers: int, place: str = "a") -> pa.Table:
    return pa.table({"number": numbers, "place": [place] * len(numbers)})


def test_a_version_has_the_files_of_its_time_in_the_order_of_writing(
    folders: TableFolders, tmp_path: Path
) -> None:
    write_deltalake(tmp_path, rows(1, 2))
    write_deltalake(tmp_path, rows(3), mode="append")

    newest, first = folders.open(tmp_path), folders.open(tmp_path, version=0)

    assert (newest.version, first.version) == (1, 0)
    assert [pq.read_table(tmp_path / file.name)["number"].to_pylist() for file in newest.files] == [
        [1, 2],
        [3],
    ]
    assert [file.name for file in first.files] == [newest.files[0].name]
    assert newest.schema.names == ["number", "place"]


def test_partition_values_come_from_the_log(folders: TableFolders, tmp_path: Path) -> None:
    write_deltalake(tmp_path, rows(1, place="a b/ü%20"), partition_by=["place"])

    (file,) = folders.open(tmp_path).files

    assert file.constants == {"place": "a b/ü%20"}
    assert pq.ParquetFile(tmp_path / file.name).read()["number"].to_pylist() == [1]


def test_what_is_no_table_is_refused(folders: TableFolders, tmp_path: Path) -> None:
    (tmp_path / "_delta_log").mkdir()
    (tmp_path / "_delta_log" / f"{0:020}.json").write_text("{")

    assert folders.is_table(tmp_path)
    assert not folders.is_table(tmp_path / "_delta_log")
    with pytest.raises(InvalidInput):
        folders.open(tmp_path)


def test_a_table_whose_files_do_not_hold_its_rows_is_refused(folders: TableFolders, tmp_path: Path) -> None:
    write_deltalake(tmp_path, rows(1))
    entry = tmp_path / "_delta_log" / f"{0:020}.json"
    before = entry.read_text()
    protocol = before.splitlines()[0 if "protocol" in before.splitlines()[0] else 1]
    vectors = (
        '{"protocol":{"minReaderVersion":3,"minWriterVersion":7,"readerFeatures":["deletionVectors"],'
        '"writerFeatures":["deletionVectors"]}}'
    )
    entry.write_text(before.replace(protocol, vectors))

    with pytest.raises(InvalidInput, match="deletionVectors"):
        folders.open(tmp_path)


def test_a_file_becomes_a_table(folders: TableFolders, tmp_path: Path) -> None:
    pq.write_table(rows(5, 6), tmp_path / "part.parquet")

    folders.require_storable(rows(5, 6).schema)
    version = folders.create(tmp_path, "part.parquet")

    assert version == 0
    assert DeltaTable(tmp_path).to_pyarrow_table()["number"].to_pylist() == [5, 6]
    assert [file.name for file in folders.open(tmp_path).files] == ["part.parquet"]


@pytest.mark.parametrize(
    "kind", [pa.uint64(), pa.float16(), pa.timestamp("ns"), pa.time32("s"), pa.duration("s")]
)
def test_types_that_a_table_does_not_keep_are_refused(folders: TableFolders, kind: pa.DataType) -> None:
    with pytest.raises(InvalidInput):
        folders.require_storable(pa.schema([("number", kind)]))
