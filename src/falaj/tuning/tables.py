"""Tables of tuning."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, ForeignKey, Integer, Table, Text

from falaj.governance.tables import object_key
from falaj.ports.metadata import METADATA, JsonText, UtcTime

studies = Table(
    "tuning_studies",
    METADATA,
    object_key(),
    Column("settings", JsonText, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("job", JsonText, nullable=False),
    Column("code", Text, ForeignKey("governance_objects.id")),
    Column("state", Text, nullable=False),
    Column("reason", Text),
    Column("stopping", Text),
    Column("best", JsonText, nullable=False),
    Column("importance", JsonText, nullable=False),
    Column("run", Text, ForeignKey("governance_objects.id")),
    Column("work", Text, ForeignKey("governance_objects.id")),
    Column("version", Text),
    Column("ended_at", UtcTime),
)

trials = Table(
    "tuning_trials",
    METADATA,
    Column("study", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("state", Text, nullable=False),
    Column("params", JsonText, nullable=False),
    Column("results", JsonText, nullable=False),
    Column("reports", JsonText, nullable=False),
    Column("pruning", Boolean, nullable=False),
    Column("reason", Text),
    Column("job", Text, ForeignKey("governance_objects.id")),
    Column("run", Text, ForeignKey("governance_objects.id")),
    Column("asked", Integer, nullable=False),
    Column("told", Integer),
    Column("created_at", UtcTime, nullable=False),
    Column("ended_at", UtcTime),
)
