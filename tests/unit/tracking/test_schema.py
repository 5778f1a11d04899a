"""The migrated schema equals the tables of tracking, on both databases."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from falaj.drivers.sql.migrate import migrate
from falaj.ports.metadata import METADATA
from falaj.tracking import tables

TABLES = tuple(table for name, table in METADATA.tables.items() if name.startswith("tracking_"))


def test_the_migration_makes_the_tables_of_tracking(database_url: str) -> None:
    migrate(database_url)
    engine = sa.create_engine(database_url)

    with engine.connect() as connection:
        options = {
            "compare_type": True,
            "include_name": lambda name, kind, _: kind != "table" or is_ours(name),
        }
        context = MigrationContext.configure(connection, opts=options)
        found = [change for change in compare_metadata(context, METADATA) if "tracking_" in str(change)]
    columns = {table: sa.inspect(engine).get_columns(table.name) for table in TABLES}
    engine.dispose()

    assert tables.runs in TABLES
    assert found == []
    for table in TABLES:
        expected = [(column.name, column.type.compile(engine.dialect)) for column in table.columns]
        assert [(column["name"], str(column["type"])) for column in columns[table]] == expected


def is_ours(name: str | None) -> bool:
    return str(name).startswith("tracking_")
