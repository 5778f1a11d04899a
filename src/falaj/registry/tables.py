"""Tables of the registry."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, ForeignKey, Index, Integer, Table, Text

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

notes = Table(  # of a model or a version, once it has a description or a tag
    "registry_notes",
    METADATA,
    object_key(),
    Column("description", Text, nullable=False),
    Column("updated_at", UtcTime, nullable=False),
)

tags = Table(
    "registry_tags",
    METADATA,
    Column("object", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
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
    Column("evidence", JsonText),
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
    Column("evidence", JsonText),
    Index("registry_approvals_version", "version", "alias"),
)

gates = Table(
    "registry_gates",
    METADATA,
    Column("model", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("alias", Text, primary_key=True),
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("rules", JsonText, nullable=False),
    Column("data", Text, ForeignKey("governance_objects.id")),
    Column("by", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("at", UtcTime, nullable=False),
)
"""Every change of the gates of an alias; the newest ones apply."""

measurements = Table(
    "registry_measurements",
    METADATA,
    Column("version", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("data", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("metric", Text, primary_key=True),
    Column("value", Double, nullable=False),
    Column("run", Text, ForeignKey("governance_objects.id")),
    Column("by", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("at", UtcTime, nullable=False),
)

evaluations = Table(
    "registry_evaluations",
    METADATA,
    Column("version", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("data", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("target", Text, primary_key=True),
    Column("metrics", JsonText, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("skipped", BigInteger, nullable=False),
    Column("output", Text, nullable=False),
    Column("job", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("by", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("at", UtcTime, nullable=False),
)
"""Metrics that jobs of the platform computed; `by` is who asked for it."""

waivers = Table(
    "registry_waivers",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("version", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("alias", Text, nullable=False),
    Column("gates", JsonText, nullable=False),
    Column("reason", Text, nullable=False),
    Column("by", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("at", UtcTime, nullable=False),
    Column("withdrawn_at", UtcTime),
    Index("registry_waivers_version", "version", "alias"),
)
