"""What every metadata database does: one suite, on SQLite and on PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from sqlalchemy import insert, select, text

from falaj.drivers.sql.database import open_database
from falaj.drivers.sql.migrate import migrate
from falaj.errors import Conflict, Unavailable
from falaj.governance.tables import epochs, outbox
from falaj.ports.metadata import Database, from_micros, to_micros


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


def test_what_was_written_is_read(database: Database) -> None:
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


def test_rows_that_do_not_fit_leave_nothing(database: Database) -> None:
    with pytest.raises(Conflict), database.write() as tx:
        tx.bulk_insert("governance_epochs", ("id", "epoch"), [(1, 1), (2, 2), (1, 3)])

    assert epoch_of(database) is None


def test_types_are_the_same_on_both(database: Database) -> None:
    moment = datetime(2026, 2, 3, 4, 5, 6, 789012, tzinfo=UTC)
    row = {"id": "e", "type": "t", "subject": "s", "data": {"b": [1, None], "a": "é"}, "at": moment}
    with database.write() as tx:
        tx.execute(insert(outbox), row | {"delivered": False})

    with database.read() as tx:
        found = dict(tx.execute(select(outbox)).mappings().one())
    assert found == row | {"delivered": False}
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


def test_a_database_that_is_not_there_is_unavailable() -> None:
    nowhere = open_database("postgresql+psycopg://nobody@/none?host=/nonexistent")

    with pytest.raises(Unavailable), nowhere.read():
        pass

    nowhere.close()
