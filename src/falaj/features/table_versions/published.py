"""The tables that the feature store has published: check their files, and remove those that were never published."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Text, cast, or_, select

from falaj.errors import Damaged, NotFound
from falaj.features import store
from falaj.features.backends import FeatureBackends
from falaj.features.table_versions import files as table_files
from falaj.features.tables import training_sets, views
from falaj.governance import backups
from falaj.governance.encryption.keyring import stop_publishing
from falaj.governance.tables import objects
from falaj.ports.metadata import Transaction
from falaj.ports.tables import StoredTableFile, TableKey, TableStore, TableVersion

log = logging.getLogger("falaj.features")


class PublishedTable(NamedTuple):
    """The newest published version of a table, and the view or training set that it belongs to."""

    subject: str
    zone: str
    table: TableKey
    number: int


def published_tables(tx: Transaction) -> list[PublishedTable]:
    """Return the tables of all versions of views that have rows, and of all training sets; not of deleted ones."""
    columns = objects.c.workspace, objects.c.zone, objects.c.name
    of_views = select(views, *columns).join(objects, objects.c.id == views.c.id)
    of_sets = select(training_sets, *columns).join(objects, objects.c.id == training_sets.c.id)
    of_views, of_sets = (each.where(objects.c.deleted_at.is_(None)) for each in (of_views, of_sets))
    found = [
        PublishedTable(
            f"view {row.name}",
            row.zone,
            store.version_table(row.workspace, row.id, row.version),
            row.table_version,
        )
        for row in tx.execute(of_views.where(views.c.table_version.is_not(None)))
    ]
    return found + [
        PublishedTable(
            f"training set {row.name}",
            row.zone,
            store.training_table(row.workspace, row.id),
            row.table_version,
        )
        for row in tx.execute(of_sets)
    ]


def published_files(tx: Transaction) -> Iterator[tuple[str, str, str]]:
    """Yield zone, path and SHA-256 of the files of published tables: of newest versions, and of those in use."""
    pins = _pins(tx)
    for each in published_tables(tx):
        numbers = {each.number, *pins[_pinned_name(each.table)]}
        for file in table_files.files_in_use(tx, each.table, pins=numbers):
            yield each.zone, f"{each.table}/{file.path}", file.sha256


def version_in_use(tx: Transaction, table: TableKey, number: int) -> TableVersion:
    """Return a published version with the files of earlier ones that are in use."""
    pins = {number, *_pins(tx, view=table.split("/")[1])[_pinned_name(table)]}
    return TableVersion(number, tuple(table_files.files_in_use(tx, table, pins=pins)))


def check_tables(backends: FeatureBackends) -> Iterator[tuple[PublishedTable, Damaged | NotFound | None]]:
    """Hash every file of every published table; yield each table with its damage, if any."""
    with backends.gate.database.read() as tx:
        found = [
            (each, table_files.load_version(tx, each.table, each.number)) for each in published_tables(tx)
        ]
    for each, version in found:
        try:
            backends.tables[each.zone].check(each.table, version=version)
        except (Damaged, NotFound) as error:
            yield each, error
        else:
            yield each, None


def remove_orphans(backends: FeatureBackends, *, before: datetime) -> int:
    """Remove files older than `before` that no published version has, or only ones that nobody reads; return how many.

    Nobody reads a version that was replaced before then, is not online, and that no training set was made from. While a
    backup is being made nothing is removed: its database may refer to it.
    """
    with backends.gate.database.read() as tx:
        pins = _pins(tx)
    removed = 0
    for tables in backends.tables.values():
        for table, files in _old_files(tables.list_files(), before).items():
            removed += _remove(backends, tables, table, files, pins=pins[_pinned_name(table)])
    return removed


def _pinned_name(table: TableKey) -> str:
    """Return the name of a table in `_pins`: without its workspace."""
    return table.partition("/")[2]


def _pins(tx: Transaction, *, view: str | None = None) -> dict[str, set[int]]:
    """Return the table versions, by `view/version`, that are online or that training sets were made from.

    With `view`, those of other views may be left out.
    """
    pins: dict[str, set[int]] = defaultdict(set)
    online = select(views.c.id, views.c.version, views.c.online_version)
    made = select(training_sets.c.views, training_sets.c.spine_pin)
    if view is not None:
        online = online.where(views.c.id == view)
        stored = [cast(column, Text) for column in (training_sets.c.views, training_sets.c.spine_pin)]
        made = made.where(or_(*(column.contains(view) for column in stored)))
    for row in tx.execute(online):
        pins[f"{row.id}/{row.version}"].add(row.online_version)
    for row in tx.execute(made):
        for pin in (*row.views, *([row.spine_pin] if row.spine_pin else [])):
            pins[f"{pin['view']}/{pin['version']}"].add(pin["table_version"])
    return pins


def _old_files(files: Iterable[StoredTableFile], before: datetime) -> dict[TableKey, list[str]]:
    found: dict[TableKey, list[str]] = defaultdict(list)
    for file in files:
        if file.modified_at < before:
            found[file.table].append(file.path)
    return found


def _remove(
    backends: FeatureBackends, tables: TableStore, table: TableKey, files: list[str], *, pins: set[int]
) -> int:
    """Remove those of `files` that are of no use. A version that is being published just now is waited for."""
    with backends.gate.database.read() as tx:
        if not table_files.unused(tx, table, files, pins=pins):
            return 0
    with backends.gate.database.write() as tx:
        stop_publishing(tx, table.partition("/")[0])
        if backups.is_held(tx, now=backends.gate.clock()):
            return 0
        unused = table_files.unused(tx, table, files, pins=pins)
        for path in unused:
            tables.delete_file(table, path)
        if store.is_training_table(table) and not table_files.recorded(tx, table):
            tables.delete(table)  # nobody writes to it again
    return len(unused)
