"""The migrated schema matches the tables of the services, on both databases, however often migrations run."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from falaj.assembly.home import open_home
from falaj.assembly.platform import assemble
from falaj.control.services import Services
from falaj.drivers.sql import migrate as migrate_module
from falaj.drivers.sql.migrate import HEAD, current_version, migrate
from falaj.governance import bootstrap
from falaj.ports.metadata import METADATA
from platforms import OwnPlatform, configuration
from polling import A_MOMENT_S

START = "import sys; from falaj.drivers.sql.migrate import migrate; migrate(sys.argv[1])"


@pytest.fixture
def engine(database_url: str) -> Any:
    """Yield an engine on a migrated database."""
    migrate(database_url)
    made = sa.create_engine(database_url)
    yield made
    made.dispose()


def schema(engine: sa.Engine) -> dict[str, Any]:
    """Return every table with its columns, keys and indexes."""
    found = sa.inspect(engine)
    return {
        table: (
            [
                (column["name"], str(column["type"]), column["nullable"])
                for column in found.get_columns(table)
            ],
            found.get_pk_constraint(table)["constrained_columns"],
            sorted(
                (tuple(key["constrained_columns"]), key["referred_table"])
                for key in found.get_foreign_keys(table)
            ),
            sorted((index["name"] or "", tuple(index["column_names"])) for index in found.get_indexes(table)),
        )
        for table in found.get_table_names()
    }


def test_migrations_make_the_tables_of_the_services(engine: sa.Engine) -> None:
    assert Services  # every service's tables are loaded

    with engine.connect() as connection:
        options = {"compare_type": True, "compare_server_default": True}
        differences = compare_metadata(MigrationContext.configure(connection, opts=options), METADATA)

    assert differences == []


def test_columns_have_the_same_types_in_the_same_order(engine: sa.Engine) -> None:
    found = schema(engine)

    for table in METADATA.sorted_tables:
        columns, primary_key, _, _ = found[table.name]
        assert [name for name, _, _ in columns] == [column.name for column in table.columns]
        assert primary_key == [column.name for column in table.primary_key]
        assert [kind for _, kind, _ in columns] == [
            column.type.compile(engine.dialect) for column in table.columns
        ]


def test_migrating_again_changes_nothing(database_url: str, engine: sa.Engine) -> None:
    before = schema(engine)

    migrate(database_url)

    assert schema(engine) == before
    assert current_version(engine) == HEAD


def test_the_named_version_is_the_newest_migration() -> None:
    folder = Path(migrate_module.__file__).parent / "migrations"

    assert ScriptDirectory(str(folder)).get_heads() == [HEAD]


def test_a_migration_that_fails_leaves_nothing(database_url: str) -> None:
    engine = sa.create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE control_pipelines (id TEXT)"))  # the last one of the schema

    with pytest.raises(sa.exc.DBAPIError):
        migrate(database_url)

    left = sa.inspect(engine).get_table_names()
    engine.dispose()
    assert left == ["control_pipelines"]


@pytest.mark.slow
def test_concurrently_started_processes_migrate_once(postgres_url: str) -> None:
    command = [sys.executable, "-c", START, postgres_url]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    started = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]

    errors = [process.communicate()[1] for process in started]

    assert ([process.returncode for process in started], errors) == ([0, 0, 0], ["", "", ""])
    engine = sa.create_engine(postgres_url)
    assert current_version(engine) == HEAD
    engine.dispose()


def test_concurrently_started_platforms_bootstrap_a_database_once(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_TEST_METADATA_URL", postgres_url)
    home = open_home(tmp_path / "home", tmp_path / "config")
    home.toml.write_text(configuration(postgres_url, ""))
    migrate(postgres_url)
    both_have_looked = threading.Barrier(2)
    real = bootstrap.is_bootstrapped

    def is_founded(tx: Any) -> bool:
        answer = real(tx)
        with suppress(threading.BrokenBarrierError):
            both_have_looked.wait(A_MOMENT_S)  # where one waits for the other, they cannot both get here
        return answer

    monkeypatch.setattr(bootstrap, "is_bootstrapped", is_founded)
    with ThreadPoolExecutor(2) as pool:
        platforms = list(pool.map(lambda _: assemble(home, as_owner=True), range(2)))

    actions = [entry["action"] for entry in OwnPlatform(platforms[0], None).entries()]  # type: ignore[arg-type]
    for platform in platforms:
        platform.close()
    assert actions == ["platform.bootstrap"]
