"""The files of published table versions, with the hashes that they had when they were written.

A file belongs to the version that it was published with, and to all later ones before `until`: the version that merged
it with others. It stays recorded when it is removed: the audit log has digests of earlier versions.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence

from sqlalchemy import RowMapping, insert, or_, select, update

from falaj.errors import Conflict
from falaj.features.tables import table_files
from falaj.ports.metadata import Transaction
from falaj.ports.tables import TableFile, TableKey, TableStore, TableVersion


def load_version(tx: Transaction, table: TableKey, number: int) -> TableVersion:
    """Return a published version; one without rows has no files."""
    query = select(table_files).where(
        table_files.c.table_key == table,
        table_files.c.version <= number,
        or_(table_files.c.until.is_(None), table_files.c.until > number),
    )
    rows = tx.execute(query.order_by(table_files.c.version, table_files.c.position)).mappings().all()
    files = tuple(TableFile(row["path"], row["size_bytes"], row["sha256"]) for row in rows)
    return TableVersion(number, files)


def digests_of_versions(tx: Transaction, table: TableKey, numbers: Sequence[int]) -> dict[int, str]:
    """Return the digests of published versions, as their recorded files have them."""
    query = select(table_files).where(table_files.c.table_key == table)
    rows = tx.execute(query.order_by(table_files.c.version, table_files.c.position)).mappings().all()
    return {number: TableVersion(number, _files_at(rows, number)).digest for number in numbers}


def _files_at(rows: Sequence[RowMapping], number: int) -> tuple[TableFile, ...]:
    """Return the files of a version: those that it or an earlier one added, and none has merged since."""
    held = (
        row for row in rows if row["version"] <= number and (row["until"] is None or row["until"] > number)
    )
    return tuple(TableFile(row["path"], row["size_bytes"], row["sha256"]) for row in held)


def publish_version(
    tx: Transaction, table: TableKey, written: TableVersion, *, onto: TableVersion | None = None
) -> None:
    """Record the files that a version adds to the published version `onto`, and those that it has no more."""
    before = () if onto is None else onto.files
    _add_files(tx, table, written, known={file.path for file in before})
    merged = {file.path for file in before} - {file.path for file in written.files}
    if merged:
        tx.execute(
            update(table_files)
            .where(table_files.c.table_key == table, table_files.c.path.in_(merged))
            .values(until=written.number)
        )


def _add_files(tx: Transaction, table: TableKey, written: TableVersion, *, known: Container[str]) -> None:
    new = [
        {
            "table_key": table,
            "path": file.path,
            "version": written.number,
            "position": position,
            "size_bytes": file.size_bytes,
            "sha256": file.sha256,
        }
        for position, file in enumerate(written.files)
        if file.path not in known
    ]
    if new:
        tx.execute(insert(table_files), new)


def require_stored(tables: TableStore, table: TableKey, written: TableVersion) -> None:
    """Raise Conflict if a cleanup removed files of a version before it was published."""
    if not tables.has_files(table, version=written):
        raise Conflict(
            f"table {table}: its new files were removed by a cleanup before they were published; try again"
        )


def files_in_use(tx: Transaction, table: TableKey, *, pins: Collection[int | None]) -> list[TableFile]:
    """Return the recorded files that any version in `pins` has."""
    rows = tx.execute(select(table_files).where(table_files.c.table_key == table)).mappings().all()
    found = {file for number in pins if number is not None for file in _files_at(rows, number)}
    return sorted(found, key=lambda file: file.path)


def unused(
    tx: Transaction, table: TableKey, old: Collection[str], *, pins: Collection[int | None]
) -> set[str]:
    """Return those of the `old` files that are not recorded, and those that were merged and no version in `pins` has.

    A merged file is in use until the version that replaced it is old, too: someone may be reading it.
    """
    query = select(table_files).where(table_files.c.table_key == table)
    rows = {row.path: row for row in tx.execute(query)}
    newest = max((rows[path].version for path in old if path in rows), default=-1)
    return {
        path
        for path in old
        if path not in rows
        or (
            rows[path].until is not None
            and rows[path].until <= newest
            and not any(pin is not None and rows[path].version <= pin < rows[path].until for pin in pins)
        )
    }


def recorded(tx: Transaction, table: TableKey) -> Mapping[str, int]:
    """Return the first version of each recorded file."""
    query = select(table_files.c.path, table_files.c.version).where(table_files.c.table_key == table)
    return {row.path: row.version for row in tx.execute(query)}
