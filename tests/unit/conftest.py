"""The platform of most tests; its schema is copied instead of migrated for each test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from falaj.drivers.sql.migrate import migrate
from platforms import TWO_ZONES, OwnPlatform, make_platform

if TYPE_CHECKING:
    from conftest import PostgresServer


@pytest.fixture(params=["sqlite", "postgres"])
def platform(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OwnPlatform]:
    """A platform with zones in two jurisdictions; the test runs on SQLite and on PostgreSQL."""
    if request.param == "sqlite":
        yield request.getfixturevalue("light_platform")
        return
    url = request.getfixturevalue("schema_on_postgres")
    with make_platform(tmp_path, url, TWO_ZONES, environment=monkeypatch) as made:
        yield made


@pytest.fixture
def light_platform(tmp_path: Path, sqlite_schema: Path) -> Iterator[OwnPlatform]:
    """The same on SQLite only, for tests that do not depend on the database."""
    (tmp_path / "home").mkdir()
    shutil.copy(sqlite_schema, tmp_path / "home" / "falaj.db")
    with make_platform(tmp_path, toml=TWO_ZONES) as made:
        yield made


@pytest.fixture(scope="session")
def sqlite_schema(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite database that has the schema and nothing else."""
    file = tmp_path_factory.mktemp("schema") / "falaj.db"
    migrate(f"sqlite:///{file}")
    return file


@pytest.fixture(scope="session")
def postgres_schema(postgres_server: PostgresServer) -> str:
    """The name of a PostgreSQL database that has the schema and nothing else."""
    name = postgres_server.create_database()
    migrate(postgres_server.url(name))
    return name


@pytest.fixture
def schema_on_postgres(postgres_server: PostgresServer, postgres_schema: str) -> Iterator[str]:
    """Yield the URL of a PostgreSQL database for this test, with the schema."""
    name = f"{postgres_schema}_{next(postgres_server.numbers)}"
    # Files are copied, not logged page by page, which takes twice the CPU time.
    postgres_server.execute(f"CREATE DATABASE {name} TEMPLATE {postgres_schema} STRATEGY FILE_COPY")
    yield postgres_server.url(name)
    postgres_server.drop_database(name)
