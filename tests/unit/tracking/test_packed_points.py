"""Points that an earlier version stored one by one are packed in blocks by the migration, and nothing is lost."""

from __future__ import annotations

import struct

import sqlalchemy as sa

from falaj.drivers.sql.migrate import migrate


def test_points_of_an_earlier_version_are_packed(database_url: str) -> None:
    migrate(database_url, to="0037")
    engine = sa.create_engine(database_url)
    count = 10_000
    with engine.begin() as connection:
        insert = sa.text(
            "INSERT INTO tracking_points (series, step, at, value, is_nan) VALUES (:s, :n, :n, :v, :nan)"
        )
        rows = [{"s": 1, "n": n, "v": 0.0 if n == 5 else float(n), "nan": n == 5} for n in range(count)]
        connection.execute(insert, [*rows, {"s": 2, "n": 7, "v": 1.5, "nan": False}])
        object_ = "INSERT INTO governance_objects (id, workspace, kind, name, owner, created_at) VALUES "
        connection.execute(sa.text(object_ + "('r', 'r', 'run', 'r', 'o', 0)"))
        series = (
            "INSERT INTO tracking_series (id, run, key, points, last_step, last_at) VALUES "
            "(1, 'r', 'a', 10000, 9999, 9999), (2, 'r', 'b', 1, 7, 7)"
        )
        connection.execute(sa.text(series))

    migrate(database_url)

    with engine.connect() as connection:
        blocks = connection.execute(
            sa.text("SELECT series, number, first_step, last_step, data FROM tracking_blocks ORDER BY 1, 2")
        ).all()
        states = connection.execute(
            sa.text("SELECT blocks, open_from, open_points FROM tracking_series ORDER BY id")
        ).all()
    engine.dispose()
    assert [tuple(block)[:4] for block in blocks] == [(1, 0, 0, 8191), (1, 1, 8192, 9999), (2, 0, 7, 7)]
    assert [tuple(state) for state in states] == [(2, 2, 0), (1, 1, 0)]
    assert struct.unpack("<2q1d", bytes(blocks[2].data)) == (7, 7, 1.5)
    size = 8192
    values = struct.unpack(f"<{2 * size}q{size}d", bytes(blocks[0].data))[2 * size :]
    assert (values[4], str(values[5]), values[6]) == (4.0, "nan", 6.0)
