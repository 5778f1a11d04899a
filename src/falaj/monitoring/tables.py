"""Tables of monitoring: monitors, window slots of endpoints, positions of monitors, and alerts."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, ForeignKey, Index, Integer, LargeBinary, Table, Text

from falaj.governance.tables import object_key
from falaj.ports.metadata import METADATA, UNRECORDED, JsonText, UtcTime


def _object(name: str, *, primary_key: bool = False) -> Column[str]:
    return Column(name, Text, ForeignKey("governance_objects.id"), primary_key=primary_key, nullable=False)


monitors = Table(
    "monitoring_monitors",
    METADATA,
    object_key(),
    _object("endpoint"),
    _object("training_set"),
    Column("columns", JsonText, nullable=False),
    Column("all_columns", Boolean, nullable=False),
    Column("window", JsonText, nullable=False),
    Column("budget", JsonText, nullable=False),
    Column("reference_rows", BigInteger, nullable=False),
    Column("reference", LargeBinary, nullable=False),
    Column("alert", Text, ForeignKey("governance_objects.id")),
    Index("monitoring_monitors_endpoint", "endpoint"),
)

endpoints = Table(
    "monitoring_endpoints",
    METADATA,
    _object("endpoint", primary_key=True),
    Column("seq", BigInteger, nullable=False),
    info=UNRECORDED,
)
"""The last slot number; this row is locked to change the slots of an endpoint."""

slots = Table(
    "monitoring_slots",
    METADATA,
    _object("endpoint", primary_key=True),
    Column("version", Text, primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("since", UtcTime, nullable=False),
    Column("until", UtcTime, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("sealed", LargeBinary, nullable=False),
    info=UNRECORDED,
)
"""Windows in order of arrival; old ones are merged."""

positions = Table(
    "monitoring_positions",
    METADATA,
    _object("monitor", primary_key=True),
    Column("version", Text, primary_key=True),
    Column("judged_seq", BigInteger, nullable=False),
    Column("judged_until", UtcTime),
    Column("verdict", Text),
    Column("windows", Integer, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("waiting_rows", BigInteger, nullable=False),
    Column("waiting_since", UtcTime),
    Column("due_at", UtcTime),
    Column("own_columns", JsonText, nullable=False),
    Column("own_reference", LargeBinary),
    Column("report", JsonText),
    Index("monitoring_positions_due", "due_at"),
    info=UNRECORDED,
)
"""Progress of a monitor with a version. `due_at` is when the next window is complete, if known."""

alerts = Table(
    "monitoring_alerts",
    METADATA,
    object_key(),
    _object("monitor"),
    _object("endpoint"),
    Column("version", Text, nullable=False),
    Column("columns", JsonText, nullable=False),
    Column("words", Text, nullable=False),
    Column("since", UtcTime, nullable=False),
    Column("until", UtcTime, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("rows_seen", BigInteger, nullable=False),
    Column("raised_at", UtcTime, nullable=False),
    Column("windows", Integer, nullable=False),
    Column("last_until", UtcTime, nullable=False),
    Column("acknowledged_by", Text),
    Column("acknowledged_at", UtcTime),
    Column("ended_at", UtcTime),
    Column("report", JsonText, nullable=False),
    Index("monitoring_alerts_monitor", "monitor", "id"),
)
