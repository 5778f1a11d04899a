"""The Database contract, on SQLite and on PostgreSQL."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import bindparam, insert, select, text
from sqlalchemy.exc import IntegrityError

from falaj.drivers.sql import database as database_module
from falaj.drivers.sql.database import open_database
from falaj.drivers.sql.migrate import migrate
from falaj.errors import Conflict, Damaged, FalajError, Unavailable
from falaj.governance import objects
from falaj.governance.tables import epochs, events, undelivered_events
from falaj.governance.tables import objects as objects_table
from falaj.ports.metadata import Database, Prepared, Transaction, from_micros, to_micros
from falaj.records.governance.objects import StoredObject
from falaj.tracking.tables import series

if TYPE_CHECKING:
    from conftest import PostgresServer

RUN: dict[str, Any] = {
    "id": "platform",
    "workspace": "platform",
    "kind": "workspace",
    "name": "platform",
    "owner": "platform",
    "created_at": datetime(2024, 1, 1, tzinfo=UTC),
}


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    migrate(database_url)
    opened = open_database(database_url)
    yield opened
    opened.close()


def epoch_of(database: Database) -> int | None:
    with database.read() as tx:
        found = tx.execute(select(epochs.c.epoch)).scalar()
        return None if found is None else int(found)


def test_written_rows_are_read_back(database: Database) -> None:
    with database.write() as tx:
        tx.execute(insert(epochs), {"id": 1, "epoch": 7})

    assert epoch_of(database) == 7


def test_a_transaction_that_raises_leaves_nothing(database: Database) -> None:
    def write_and_fail() -> None:
        with database.write() as tx:
            tx.execute(insert(epochs), {"id": 1, "epoch": 7})
            tx.execute_sql("INSERT INTO governance_epochs (id, epoch) VALUES (?, ?)", (2, 8))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_and_fail()

    assert epoch_of(database) is None


def test_quick_statements_are_part_of_the_transaction(database: Database) -> None:
    with database.write() as tx:
        tx.execute_sql("INSERT INTO governance_epochs (id, epoch) VALUES (?, ?)", (1, 7))

        assert tx.execute(select(epochs.c.epoch)).scalar() == 7
        assert tx.execute_sql("SELECT epoch FROM governance_epochs WHERE id = ?", (1,)) == [(7,)]
    assert epoch_of(database) == 7


def test_many_rows_are_inserted_at_once_and_with_the_rest(database: Database) -> None:
    with database.write() as tx:
        tx.execute(insert(epochs), {"id": 1, "epoch": 7})
        count = tx.bulk_insert("governance_epochs", ("id", "epoch"), ((n, n * n) for n in range(2, 1000)))

    with database.read() as tx:
        assert count == 998
        assert tx.execute_sql("SELECT COUNT(*), MAX(epoch) FROM governance_epochs") == [(999, 999 * 999)]


def test_invalid_rows_leave_nothing(database: Database) -> None:
    with pytest.raises(Conflict), database.write() as tx:
        tx.bulk_insert("governance_epochs", ("id", "epoch"), [(1, 1), (2, 2), (1, 3)])

    assert epoch_of(database) is None


def test_column_types_round_trip(database: Database) -> None:
    moment = datetime(2026, 2, 3, 4, 5, 6, 789012, tzinfo=UTC)
    row = {"seq": 2**62, "part": 0, "id": "e", "type": "t", "subject": "s", "workspace": "w"}
    row |= {"data": {"b": [1, None], "a": "é"}, "at": moment}
    lost = {"webhook": "w", "seq": 1, "part": 0, "attempts": 5, "error": "e", "given_up_at": moment}
    with database.write() as tx:
        tx.execute(insert(events), row)
        tx.execute(insert(undelivered_events), lost | {"redelivering": False})

    with database.read() as tx:
        assert dict(tx.execute(select(events)).mappings().one()) == row
        found = dict(tx.execute(select(undelivered_events)).mappings().one())
    assert found == lost | {"redelivering": False}
    assert from_micros(to_micros(moment)) == moment


def test_a_reader_does_not_wait_for_a_writer(database: Database) -> None:
    with database.write() as tx:
        tx.execute(insert(epochs), {"id": 1, "epoch": 7})

        assert epoch_of(database) is None


def test_the_same_row_twice_is_a_conflict(database: Database) -> None:
    with database.write() as tx:
        tx.execute(insert(epochs), {"id": 1, "epoch": 7})

    with pytest.raises(Conflict), database.write() as tx:
        tx.execute(insert(epochs), {"id": 1, "epoch": 8})
    with pytest.raises(Conflict), database.write() as tx:
        tx.execute_sql("INSERT INTO governance_epochs (id, epoch) VALUES (?, ?)", (1, 9))

    assert epoch_of(database) == 7


def test_a_row_that_breaks_a_rule_by_itself_is_no_conflict(database: Database) -> None:
    """Trying again, as a conflict advises, would never help."""
    with pytest.raises(IntegrityError), database.write() as tx:
        tx.execute(text("INSERT INTO governance_epochs (id, epoch) VALUES (1, NULL)"))


def test_writers_do_not_lose_updates(database: Database) -> None:
    with database.write() as tx:
        tx.execute(insert(epochs), {"id": 1, "epoch": 0})

    def advance() -> None:
        for _ in range(20):
            with database.write() as tx:
                tx.execute(text("UPDATE governance_epochs SET epoch = epoch + 1"))

    threads = [threading.Thread(target=advance) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert epoch_of(database) == 160


def test_a_missing_database_is_unavailable() -> None:
    nowhere = open_database("postgresql+psycopg://nobody@/none?host=/nonexistent")

    with pytest.raises(Unavailable), nowhere.read():
        pass

    nowhere.close()


# ------------------------------------------------------------------------------------------ what is wrong


@contextmanager
def opened(url: str) -> Iterator[Database]:
    found = open_database(url)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A SQLite database that has the schema."""
    migrate(f"sqlite:///{tmp_path / 'falaj.db'}")
    return tmp_path / "falaj.db"


def failure(url: str, act: Callable[[Transaction], object] = lambda _tx: None) -> FalajError:
    """The error of a transaction on the database at `url`."""
    with opened(url) as database, pytest.raises(FalajError) as caught, database.write() as tx:
        act(tx)
    return caught.value


def test_a_full_disk_is_said(file: Path) -> None:
    def fill(tx: Transaction) -> None:
        tx.execute_sql("PRAGMA max_page_count = 1")  # no page more than there are
        tx.bulk_insert("governance_epochs", ("id", "epoch"), ((n, n) for n in range(2, 100_000)))

    error = failure(f"sqlite:///{file}", fill)

    assert isinstance(error, Unavailable)
    assert "disk of the metadata database is full" in error.message
    with opened(f"sqlite:///{file}") as database:
        assert epoch_of(database) is None


def test_writers_go_on_after_a_commit_that_failed(file: Path) -> None:
    def refer_to_nothing(tx: Transaction) -> None:
        tx.execute(text("PRAGMA defer_foreign_keys = ON"))  # then it is the commit that finds the fault
        tx.execute(insert(objects_table), {**RUN, "id": "lost", "workspace": "nowhere"})

    with opened(f"sqlite:///{file}") as database:
        with pytest.raises(Conflict), database.write() as tx:
            refer_to_nothing(tx)
        with database.write() as tx:
            tx.execute(insert(epochs), {"id": 1, "epoch": 7})

        assert epoch_of(database) == 7


def garble(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[4096:] = os.urandom(len(raw) - 4096)
    path.write_bytes(raw)


@pytest.mark.parametrize("harm", [garble, lambda path: path.write_bytes(b"not a database" * 1000)])
def test_damage_is_said_with_the_way_back(file: Path, harm: Callable[[Path], None]) -> None:
    harm(file)

    error = failure(f"sqlite:///{file}", lambda tx: tx.execute_sql("SELECT * FROM governance_epochs"))

    assert isinstance(error, Damaged)
    assert "falaj restore" in error.message


def test_a_lock_is_said(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_S", 0.1)
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")

        assert "is locked" in failure(f"sqlite:///{file}").message


def test_a_file_that_cannot_be_opened_is_said(tmp_path: Path) -> None:
    assert "cannot be opened" in failure(f"sqlite:///{tmp_path}").message


def test_an_old_sqlite_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    monkeypatch.setattr(sqlite3, "sqlite_version", "3.34.1")

    with pytest.raises(Unavailable, match=r"is 3\.34\.1, and .* needs 3\.35 or newer"):
        migrate(f"sqlite:///{tmp_path / 'falaj.db'}")


def test_a_user_that_postgres_refuses_is_said(postgres_url: str) -> None:
    assert "refuses the user" in failure(postgres_url.replace("postgres@/", "nobody@/")).message


def test_a_database_that_postgres_lacks_is_said(postgres_server: PostgresServer) -> None:
    assert "no database of the name" in failure(postgres_server.url("nowhere")).message


@pytest.mark.parametrize(
    ("state", "kind", "words"),
    [
        ("53100", Unavailable, "full"),
        ("XX001", Damaged, "falaj restore"),
        ("25006", Unavailable, "read-only"),
        ("57P01", Unavailable, "starting, stopping"),
    ],
)
def test_what_postgres_reports_is_said(
    postgres_url: str, state: str, kind: type[FalajError], words: str
) -> None:
    raising = f"DO $$ BEGIN RAISE EXCEPTION 'so' USING ERRCODE = '{state}'; END $$"

    error = failure(postgres_url, lambda tx: tx.execute_sql(raising))

    assert isinstance(error, kind)
    assert words in error.message


def test_prepared_statements_do_what_sqlalchemy_does(database: Database) -> None:
    moments = [datetime(2024, 1, day, tzinfo=UTC) for day in (1, 2, 3)]
    rows = [
        {"seq": number, "part": 0, "id": f"evt-{number}", "type": kind, "subject": "s", "workspace": "w"}
        | {"data": {"n": number}, "at": moments[number]}
        for number, kind in enumerate(("even", "odd"))
    ]
    lost = {"webhook": "w", "seq": 1, "part": 0, "attempts": 5, "error": "e", "given_up_at": moments[0]}
    query = select(events).where(events.c.type == bindparam("kind"), events.c.at >= bindparam("since"))
    given = {"kind": "odd", "since": moments[1]}
    with database.write() as tx:
        for row in rows:
            tx.insert(events, row)
        tx.insert(undelivered_events, lost | {"redelivering": True})
        tx.update(events, {"seq": 1, "part": 0, "id": "evt-1"}, {"data": {"n": 5}, "at": moments[2]})

    asked = select(undelivered_events).where(undelivered_events.c.redelivering == bindparam("asked"))
    with database.read() as tx:
        found = tx.fetch(Prepared(query.order_by(events.c.seq)), given)
        stored = [dict(row) for row in tx.execute(query, given).mappings()]
        everything = tx.fetch(
            Prepared(select(events).order_by(events.c.seq).limit(bindparam("most"))), {"most": 9}
        )
        assert tx.fetch(Prepared(asked), {"asked": True}) == [lost | {"redelivering": True}]
    assert found == stored == [rows[1] | {"data": {"n": 5}, "at": moments[2]}]
    assert everything[0] == rows[0]


def test_a_prepared_insert_that_breaks_a_constraint_is_a_conflict(database: Database) -> None:
    with database.write() as tx:
        tx.insert(epochs, {"id": 1, "epoch": 7})

    with pytest.raises(Conflict), database.write() as tx:
        tx.insert(epochs, {"id": 1, "epoch": 8})

    assert epoch_of(database) == 7


def test_a_prepared_query_of_numbers_returns_numbers(database: Database) -> None:
    row = {
        "run": "r",
        "key": "loss",
        "points": 1,
        "last": 0.5,
        "last_step": 1,
        "last_at": 2,
        "low": None,
        "high": 0.5,
    }
    with database.write() as tx:
        objects.create(tx, StoredObject(**RUN))
        tx.insert(series, row | {"id": 1, "run": RUN["id"]})

    with database.read() as tx:
        (found,) = tx.fetch(Prepared(select(series)), {})
        assert found == dict(tx.execute(select(series)).mappings().one())
        assert isinstance(found["last"], float)
