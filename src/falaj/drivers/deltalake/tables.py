"""Tables as Delta Lake, on local files.

delta-rs syncs nothing and checks nothing: files are synced and hashed here, and a version is read from the files that
its writer returned, not from the log (see decision 0019).
"""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pyarrow.dataset as datasets
from deltalake import (
    CommitProperties,
    DeltaTable,
    PostCommitHookProperties,
    WriterProperties,
    write_deltalake,
)
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from pyarrow.fs import LocalFileSystem
from pyarrow.parquet import read_metadata

from falaj.drivers.deltalake import writer_queue
from falaj.drivers.deltalake.file_hashes import RECHECK_SHARE, FileHashes
from falaj.drivers.fsync import make_directories, sync_directory, sync_file
from falaj.errors import Conflict, Damaged, Fault, Internal, NotFound, Unavailable
from falaj.ports.tables import ArrowDataset, ArrowRows, StoredTableFile, TableFile, TableKey, TableVersion

log = logging.getLogger("falaj.features")

MARK = "falaj.write"
"""The commit metadata key that identifies a write: the newest version may already be another writer's."""

LOG = "_delta_log"
QUEUES = ".queues"
"""The folder below the root with the queues of writers."""
LAST_CHECKPOINT = "_last_checkpoint"
SMALL_BYTES = (64 << 10, 1 << 20, 8 << 20)
MERGED_FILES = 16
"""If so many files are smaller than one of these sizes, they are merged to files of about the sum of such ones."""
KEEP_LOG = PostCommitHookProperties(cleanup_expired_logs=False)
"""Otherwise delta-rs removes log entries after 30 days, and with them versions that are published."""
ROW_GROUPS = WriterProperties(max_row_group_size=1 << 17)
"""Readers hold a row group in memory; the default has a million rows."""


class DeltaTables:
    """A TableStore. Each table is a folder below `root` with Parquet files and a log of versions."""

    def __init__(self, root: Path, *, recheck_share: float = RECHECK_SHARE) -> None:
        self._root = root
        self._hashes = FileHashes(recheck_share=recheck_share)

    def turn(self, queue: TableKey, *, wait_s: float, subject: str = "") -> AbstractContextManager[None]:
        folder = self._root / QUEUES / queue.replace("/", "+")  # one queue is not within another
        return writer_queue.turn(folder, wait_s=wait_s, subject=subject or f"table {queue}")

    def append(self, table: TableKey, rows: ArrowRows, *, onto: TableVersion) -> TableVersion:
        found = self._open(table)
        with _translate_errors(table):
            if found.version() < onto.number:
                raise _damaged_log(table, f"it ends at version {found.version()}")
            if found.version() != onto.number:  # later versions were never published
                found.restore(onto.number)
            if _names(found) != {file.path for file in onto.files}:
                raise _damaged_log(table, "it names other files")
            before = found.version()
            write_deltalake(
                found,
                rows,
                mode="append",
                writer_properties=ROW_GROUPS,
                post_commithook_properties=KEEP_LOG,
            )
            if found.version() != before + 1:
                raise _conflict(table)
            written = _names(found)
            self._compact(table, found, onto)
            names = _names(found)
            for name in written - names:  # merged at once or before; the log names them
                sync_file(self._path(table) / name)
        kept = tuple(file for file in onto.files if file.path in names)
        added = self._stored(table, names - {file.path for file in kept}, after=onto.number)
        return TableVersion(int(found.version()), (*kept, *added))

    def overwrite(self, table: TableKey, rows: ArrowRows) -> TableVersion:
        path = self._path(table)
        with _translate_errors(table):
            make_directories(path, below=self._root)
            found = DeltaTable(str(path)) if DeltaTable.is_deltatable(str(path)) else None
            before = -1 if found is None else found.version()
            token = uuid.uuid4().hex
            write_deltalake(
                found or str(path),
                rows,
                mode="overwrite",
                schema_mode="overwrite",
                writer_properties=ROW_GROUPS,
                commit_properties=CommitProperties(custom_metadata={MARK: token}),
                post_commithook_properties=KEEP_LOG,
            )
            number = _version_of(DeltaTable(str(path)), token)
            written = DeltaTable(str(path), version=number)
        if number != before + 1:  # it may hold rows of another writer
            raise _conflict(table)
        return TableVersion(number, self._stored(table, _names(written), after=-1))

    def read(self, table: TableKey, *, version: TableVersion) -> ArrowDataset:
        self._require(table, version, afresh=False)
        if not version.files:
            return self._read_empty(table, version.number)
        paths = [str(self._path(table) / file.path) for file in version.files]
        kind, here = datasets.ParquetFileFormat(), LocalFileSystem()
        return datasets.FileSystemDataset.from_paths(
            paths, schema=kind.inspect(paths[0], here), format=kind, filesystem=here
        )

    def check(self, table: TableKey, *, version: TableVersion) -> None:
        self._require(table, version, afresh=True)

    def has_files(self, table: TableKey, *, version: TableVersion) -> bool:
        return all((self._path(table) / file.path).is_file() for file in version.files)

    def list_files(self) -> Iterator[StoredTableFile]:
        for path in self._root.rglob("*.parquet*"):
            if LOG not in path.parts:
                try:
                    changed_at = datetime.fromtimestamp(path.stat().st_mtime, UTC)
                except FileNotFoundError:  # removed meanwhile
                    continue
                table = TableKey(path.parent.relative_to(self._root).as_posix())
                yield StoredTableFile(table, path.name, changed_at)

    def delete_file(self, table: TableKey, path: str) -> None:
        (self._path(table) / path).unlink(missing_ok=True)

    def delete(self, table: TableKey) -> None:
        shutil.rmtree(self._path(table), ignore_errors=True)

    def _compact(self, table: TableKey, found: DeltaTable, onto: TableVersion) -> None:
        """Merge small files if many have piled up: the cost of an append grows with the number of files.

        Files are merged with others of a similar size, so that each row is rewritten a few times at most. The merged
        ones stay on disk for earlier versions. Files that are not what was written are never merged.
        """
        for limit_bytes in SMALL_BYTES:
            sizes = self._sizes(table, found, onto)
            if sum(size < limit_bytes for size in sizes.values()) < MERGED_FILES:
                continue
            merged = {name for name, size in sizes.items() if size < MERGED_FILES * limit_bytes}
            files = tuple(file for file in onto.files if file.path in merged)
            try:
                self._require(table, TableVersion(onto.number, files), afresh=True)
            except Damaged as error:
                log.error("a damaged table is not compacted", extra={"table": table, "reason": error.message})
                return
            found.optimize.compact(
                target_size=MERGED_FILES * limit_bytes, post_commithook_properties=KEEP_LOG
            )
            now = _names(found)
            if self._rows(table, sizes.keys() - now) != self._rows(table, now - sizes.keys()):
                raise Internal(f"table {table}: its files have other rows after they were merged")
            found.create_checkpoint()  # opening the table replays the log from there

    def _sizes(self, table: TableKey, found: DeltaTable, onto: TableVersion) -> dict[str, int]:
        known = {file.path: file.size_bytes for file in onto.files}
        folder = self._path(table)
        return {name: known.get(name) or (folder / name).stat().st_size for name in _names(found)}

    def _rows(self, table: TableKey, names: Iterable[str]) -> int:
        return sum(read_metadata(self._path(table) / name).num_rows for name in names)

    def _read_empty(self, table: TableKey, number: int) -> ArrowDataset:
        found = self._open(table, version=number)
        if names := _names(found):
            raise Damaged(f"table {table}@{number} has {len(names)} files that are not recorded")
        return found.to_pyarrow_dataset()

    def _stored(self, table: TableKey, names: Iterable[str], *, after: int) -> tuple[TableFile, ...]:
        """Flush the new files `names`, and the log of all versions behind `after`; return the files with hashes."""
        folder = self._path(table)
        with _translate_errors(table):
            for name in (files := sorted(names)):
                sync_file(folder / name)
            first = f"{after + 1:020}"
            for path in (folder / LOG).iterdir():
                if path.name >= first or path.name == LAST_CHECKPOINT:
                    sync_file(path)
            sync_directory(folder / LOG)
            sync_directory(folder)
            return tuple(self._hashes.hash(folder / name) for name in files)

    def _require(self, table: TableKey, version: TableVersion, *, afresh: bool) -> None:
        folder = self._path(table)
        found = (
            self._hashes.fault(folder / file.path, file, where=f"{table}/{file.path}", afresh=afresh)
            for file in version.files
        )
        if faults := [fault for fault in found if fault is not None]:
            raise Damaged(
                f"table {table}@{version.number} is damaged: {len(faults)} of its {len(version.files)} files "
                "are not what was written",
                faults=faults,
            )

    def _open(self, table: TableKey, *, version: int | None = None) -> DeltaTable:
        shown = table if version is None else f"{table}@{version}"
        try:
            return DeltaTable(str(self._path(table)), version=version)
        except (TableNotFoundError, DeltaError) as error:
            if version is None and (self._path(table) / LOG).is_dir():
                raise _damaged_log(table, "delta-rs cannot read it") from error
            raise NotFound(f"table {shown} does not exist") from error

    def _path(self, table: TableKey) -> Path:
        return self._root / table


@contextmanager
def _translate_errors(table: TableKey) -> Iterator[None]:
    try:
        yield
    except CommitFailedError as error:
        raise _conflict(table) from error
    except (DeltaError, OSError) as error:
        raise Unavailable(f"table {table} cannot be written: {error}") from error


def _conflict(table: TableKey) -> Conflict:
    return Conflict(f"table {table}: another writer committed in between; try again")


def _damaged_log(table: TableKey, given: str) -> Damaged:
    fix = "put the folder _delta_log back from a backup; the published rows can be read without it"
    fault = Fault(where=f"{table}/{LOG}", given=given, allowed="the log that was written", fix=fix)
    return Damaged(f"the log of table {table} is damaged, and nothing can be added to it", faults=[fault])


def _names(table: DeltaTable) -> set[str]:
    return {uri.rpartition("/")[2] for uri in table.file_uris()}


def _version_of(table: DeltaTable, token: str) -> int:
    return next(int(commit["version"]) for commit in table.history() if commit.get(MARK) == token)
