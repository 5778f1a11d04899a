"""The tables of tracking."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, ForeignKey, Index, Integer, Table, Text

from falaj.governance.tables import object_key
from falaj.ports.metadata import METADATA, UNRECORDED, UtcTime


def _run_key() -> Column[str]:
    return Column("run", Text, ForeignKey("governance_objects.id"), primary_key=True)


runs = Table(
    "tracking_runs",
    METADATA,
    object_key(),
    Column("experiment", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("ended_at", UtcTime),
    Index("tracking_runs_experiment", "experiment", "id"),
)

params = Table(
    "tracking_params",
    METADATA,
    _run_key(),
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

tags = Table(
    "tracking_tags",
    METADATA,
    _run_key(),
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

series = Table(  # one metric of one run, and its summary; `last`, `low` and `high` are null for NaN
    "tracking_series",
    METADATA,
    Column("id", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True),
    Column("run", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("key", Text, nullable=False),
    Column("points", BigInteger, nullable=False),
    Column("last", Double),
    Column("last_step", BigInteger, nullable=False),
    Column("last_at", BigInteger, nullable=False),
    Column("low", Double),
    Column("high", Double),
    Index("tracking_series_key", "run", "key", unique=True),
    info=UNRECORDED,
)

points = (
    Table(  # no foreign key: it would be checked for every point. SQLite cannot store NaN: `value` is 0 then
        "tracking_points",
        METADATA,
        Column("series", BigInteger, primary_key=True, autoincrement=False),
        Column("step", BigInteger, primary_key=True, autoincrement=False),
        Column("at", BigInteger, primary_key=True, autoincrement=False),
        Column("value", Double, primary_key=True),
        Column("is_nan", Boolean, primary_key=True),
        sqlite_with_rowid=False,
        info=UNRECORDED,
    )
)

batches = Table(
    "tracking_batches",
    METADATA,
    _run_key(),
    Column("batch", Text, primary_key=True),
    Column("digest", Text, nullable=False),
    Column("stored", BigInteger, nullable=False),
    Column("repeated", BigInteger, nullable=False),
    info=UNRECORDED,
)

artifacts = Table(
    "tracking_artifacts",
    METADATA,
    _run_key(),
    Column("path", Text, primary_key=True),
    Column("blob", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("attached_at", UtcTime, nullable=False),
)
