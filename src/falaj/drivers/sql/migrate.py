"""Migrates a database to the schema of this version."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from falaj.drivers.sql.database import sqlite_engine, translate_errors
from falaj.errors import Conflict

HEAD = "0001"
"""The newest migration. An up-to-date database opens without loading alembic."""

LOCK = 0x66616C616A
"""Serialises the migrations of platforms that start concurrently on one PostgreSQL."""


def migrate(url: str, *, to: str | None = None) -> None:
    """Run the missing migrations, up to `to` or all of them, in one transaction."""
    engine = (
        sqlite_engine(url, begin="BEGIN IMMEDIATE") if url.startswith("sqlite") else sa.create_engine(url)
    )
    try:
        with translate_errors():
            version = current_version(engine)
        if version is not None and version > HEAD:
            raise Conflict(
                f"the metadata database has schema {version}, of a newer Falaj; this version supports {HEAD}"
            )
        if version is None or version < (to or HEAD):
            _upgrade(engine, to or HEAD)
    finally:
        engine.dispose()


def current_version(engine: sa.Engine) -> str | None:
    with engine.connect() as connection:
        if not sa.inspect(connection).has_table("alembic_version"):
            return None
        version = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
        return None if version is None else str(version)


def _upgrade(engine: sa.Engine, to: str) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
        config.attributes["connection"] = connection
        command.upgrade(config, to)
