"""Tables of the registry."""

from __future__ import annotations

from sqlalchemy import Boolean, Column, ForeignKey, Index, Integer, Table, Text

from falaj.governance.tables import object_key
from falaj.ports.metadata import METADATA, JsonText, UtcTime

models = Table(
    "registry_models",
    METADATA,
    object_key(),
    Column("versions", Integer, nullable=False),
)

versions = Table(
    "registry_versions",
    METADATA,
    object_key(),
    Column("model", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("manifest", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("signature", Text, nullable=False),
    Index("registry_versions_number", "model", "number", unique=True),
)

aliases = Table(
    "registry_aliases",
    METADATA,
    Column("model", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("alias", Text, primary_key=True),
    Column("protected", Boolean, nullable=False),
    Column("independent", Boolean),
)

alias_changes = Table(
    "registry_alias_changes",
    METADATA,
    Column("model", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("alias", Text, primary_key=True),
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("version", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("previous", Text, ForeignKey("governance_objects.id")),
    Column("move", Text, nullable=False),
    Column("by", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("at", UtcTime, nullable=False),
)

approvals = Table(
    "registry_approvals",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("version", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("alias", Text, nullable=False),
    Column("by", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("comment", Text, nullable=False),
    Column("at", UtcTime, nullable=False),
    Column("withdrawn_at", UtcTime),
    Column("appointment", JsonText),
    Column("independent", Boolean),
    Index("registry_approvals_version", "version", "alias"),
)
