"""Tables of optimization."""

from __future__ import annotations

from sqlalchemy import Column, ForeignKey, Table, Text

from falaj.governance.tables import object_key
from falaj.ports.metadata import METADATA, JsonText

optimizations = Table(
    "optimization_optimizations",
    METADATA,
    object_key(),
    Column("model", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("data", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("job", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("target", Text, nullable=False),
    Column("features", JsonText, nullable=False),
    Column("budget", JsonText, nullable=False),
    Column("report", JsonText, nullable=False),
    Column("held_out", Text, ForeignKey("governance_objects.id")),
    Column("student", Text, ForeignKey("governance_objects.id")),
)
