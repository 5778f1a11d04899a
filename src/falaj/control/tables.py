"""The tables of the control plane: requested work, the lease of the controller, and pipelines."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, ForeignKey, Index, Integer, Table, Text

from falaj.ports.metadata import METADATA, UNRECORDED, JsonText, UtcTime, recorded

work = Table(
    "control_work",
    METADATA,
    Column("id", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("workflow", Text, nullable=False),
    Column("input", JsonText, nullable=False),
    Column("behalf", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("scope", Text, ForeignKey("governance_objects.id")),
    Column("actions", JsonText),
    Column("token", Text),
    Column("state", Text, nullable=False),
    Column("step", Integer, nullable=False),
    Column("steps", Integer),
    Column("doing", Text),
    Column("result", JsonText),
    Column("error", Text),
    Column("cancelling", Boolean, nullable=False),
    Column("ended_at", UtcTime),
    Index("control_work_state", "state"),
    info=recorded("workflow", "input", "behalf", "scope", "actions"),
)

leases = Table(
    "control_leases",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("expires_at", UtcTime, nullable=False),
    info=UNRECORDED,
)

pipelines = Table(
    "control_pipelines",
    METADATA,
    Column("id", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("definition", JsonText, nullable=False),
    Column("code", Text, ForeignKey("governance_objects.id")),
    Column("applied_by", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("started_at", UtcTime),
    Column("cause", Text),
    Column("work", Text, ForeignKey("governance_objects.id")),
    info=recorded("definition", "code", "applied_by"),
)
