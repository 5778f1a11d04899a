"""Delta tables in folders of users: read their log, and create one around a file of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, create_table_with_add_actions
from pyarrow.parquet import read_metadata

from falaj.drivers.fsync import sync_directories, sync_file
from falaj.errors import Fault, InvalidInput, shorten
from falaj.ports.table_folders import ArrowSchema, LoggedFile, LoggedTable

KNOWN_FEATURES = frozenset(["timestampNtz"])
"""Reader features that do not change what the files of a table mean."""
LOG = "_delta_log"
PARTITION = "partition."


class DeltaFolders:
    """Implements TableFolders with delta-rs."""

    def is_table(self, folder: Path) -> bool:
        return (folder / LOG).is_dir()

    def open(self, folder: Path, *, version: int | None = None) -> LoggedTable:
        with _translate_errors(folder):
            table = DeltaTable(str(folder), version=version)
            _require_plain(folder, table)
            schema = pa.schema(table.schema().to_arrow())
            actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
        actions.sort(key=lambda action: (action["modification_time"], action["path"]))
        return LoggedTable(int(table.version()), schema, [_logged_file(folder, each) for each in actions])

    def require_storable(self, schema: ArrowSchema) -> None:
        try:
            stored = pa.schema(Schema.from_arrow(schema).to_arrow())
        except Exception as error:  # delta-rs raises plain Exceptions for types that it does not know
            raise InvalidInput.at(
                "output", given=shorten(str(error), limit=300), allowed="types that Delta has"
            ) from None
        faults = [
            Fault(
                where=f"column {field.name}",
                given=str(field.type),
                allowed="a type that Delta keeps as it is; times have microseconds",
                fix="write a Parquet file, or leave the column out with --keep",
            )
            for field in schema
            if _plain(field.type) != _plain(stored.field(field.name).type) or "[ns" in str(field.type)
        ]
        if faults:
            raise InvalidInput("a Delta table cannot hold these columns", faults=faults)

    def create(self, folder: Path, file: str) -> int:
        path = folder / file
        metadata = read_metadata(path)
        schema = metadata.schema.to_arrow_schema()
        entry = path.stat()
        added = AddAction(
            file,
            entry.st_size,
            {},
            int(entry.st_mtime * 1000),
            data_change=True,
            stats=json.dumps({"numRecords": metadata.num_rows}),
        )
        with _translate_errors(folder):
            create_table_with_add_actions(str(folder), Schema.from_arrow(schema), [added], mode="error")
            version = int(DeltaTable(str(folder)).version())
        for written in (folder / LOG).iterdir():
            sync_file(written)
        sync_directories(folder)
        return version


def _require_plain(folder: Path, table: DeltaTable) -> None:
    protocol = table.protocol()
    unknown = set(protocol.reader_features or ()) - KNOWN_FEATURES
    mapping = (table.metadata().configuration or {}).get("delta.columnMapping.mode", "none")
    if protocol.min_reader_version == 2 and mapping != "none":
        unknown.add("columnMapping")
    if unknown:
        raise InvalidInput.at(
            str(folder),
            given=f"a Delta table with {', '.join(sorted(unknown))}",
            allowed="a table whose files hold all rows under the names of its columns",
            fix="copy it into a table without these features",
        )


def _logged_file(folder: Path, action: dict[str, Any]) -> LoggedFile:
    name = unquote(action["path"])
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "://" in name:
        raise InvalidInput.at(
            str(folder), given=f"a file {shorten(name)} in its log", allowed="files below its own folder"
        )
    constants = {
        key.removeprefix(PARTITION): value for key, value in action.items() if key.startswith(PARTITION)
    }
    return LoggedFile(name, constants)


def _plain(kind: Any) -> str:
    """Return the type as text without what Delta does not tell apart: large types, and names of list items."""
    text = str(kind).replace("large_", "").replace("string_view", "string").replace("binary_view", "binary")
    return text.replace("<item: ", "<element: ").replace(" not null", "")


@contextmanager
def _translate_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except InvalidInput:
        raise
    except (DeltaError, OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise InvalidInput.at(
            str(folder),
            given=shorten((str(error).splitlines() or ["?"])[0], limit=300),
            allowed="a Delta table",
        ) from None
