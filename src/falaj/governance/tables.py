"""The tables of governance."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    text,
)

from falaj.ports.metadata import METADATA, JsonText, UtcTime


def object_key() -> Column[str]:
    """Return the primary key of a table with further columns of an object."""
    return Column("id", Text, ForeignKey("governance_objects.id"), primary_key=True)


objects = Table(
    "governance_objects",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("workspace", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("kind", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("zone", Text),
    Column("label", JsonText),
    Column("own_label", JsonText),
    Column("created_at", UtcTime, nullable=False),
    Column("deleted_at", UtcTime),
    Index(
        "governance_objects_name",
        "workspace",
        "kind",
        "name",
        unique=True,
        sqlite_where=text("deleted_at IS NULL"),
        postgresql_where=text("deleted_at IS NULL"),
    ),
)

principals = Table(
    "governance_principals",
    METADATA,
    object_key(),
    Column("disabled_at", UtcTime),
)

group_members = Table(
    "governance_group_members",
    METADATA,
    Column("group_id", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("member", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Index("governance_group_members_member", "member"),
)

grants = Table(
    "governance_grants",
    METADATA,
    Column("workspace", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("subject", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("role", Text, primary_key=True),
    Index("governance_grants_subject", "subject"),
)

tokens = Table(
    "governance_tokens",
    METADATA,
    object_key(),
    Column("principal", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("secret_hash", LargeBinary, nullable=False),
    Column("scope", Text, ForeignKey("governance_objects.id")),
    Column("actions", JsonText),
    Column("purpose", Text, nullable=False),
    Column("issuer", Text),
    Column("expires_at", UtcTime, nullable=False),
    Column("revoked_at", UtcTime),
    Index("governance_tokens_principal", "principal"),
)

sign_in_codes = Table(
    "governance_sign_in_codes",
    METADATA,
    Column("code_hash", LargeBinary, primary_key=True),
    Column("principal", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("expires_at", UtcTime, nullable=False),
)

policies = Table(
    "governance_policies",
    METADATA,
    Column("id", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("text", Text, nullable=False),
    Column("published_at", UtcTime, nullable=False),
    Column("withdrawn_at", UtcTime),
)

epochs = Table(
    "governance_epochs",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("epoch", BigInteger, nullable=False),
)

blobs = Table(
    "governance_blobs",
    METADATA,
    object_key(),
    Column("key", Text, nullable=False, unique=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("staged_until", UtcTime),
)

data_keys = Table(
    "governance_data_keys",
    METADATA,
    Column("workspace", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("root", Text, nullable=False),
    Column("wrapped", LargeBinary),
    Column("created_at", UtcTime, nullable=False),
    Column("destroyed_at", UtcTime),
)

secrets = Table(
    "governance_secrets",
    METADATA,
    object_key(),
    Column("sealed", LargeBinary, nullable=False),
    Column("set_by", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("changed_at", UtcTime, nullable=False),
)

activities = Table(
    "governance_activities",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("action", Text, nullable=False),
    Column("caller", Text, nullable=False),
    Column("at", UtcTime, nullable=False),
)

lineage_edges = Table(
    "governance_lineage_edges",
    METADATA,
    Column("source", Text, primary_key=True),
    Column("target", Text, primary_key=True),
    Index("governance_lineage_edges_target", "target"),
)

audit_entries = Table(
    "governance_audit_entries",
    METADATA,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("at", UtcTime, nullable=False),
    Column("caller", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("workspace", Text),
    Column("leaf", LargeBinary, nullable=False),
    Column("entry", Text, nullable=False),
)

audit_state = Table(
    "governance_audit_state",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("log_id", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("frontier", Text, nullable=False),
)

audit_heads = Table(
    "governance_audit_heads",
    METADATA,
    Column("size", BigInteger, primary_key=True, autoincrement=False),
    Column("root", Text, nullable=False),
    Column("at", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("signature", Text, nullable=False),
)

outbox = Table(
    "governance_outbox",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("type", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("data", JsonText, nullable=False),
    Column("at", UtcTime, nullable=False),
    Column("delivered", Boolean, nullable=False),
)

idempotency = Table(
    "governance_idempotency",
    METADATA,
    Column("caller", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("action", Text, nullable=False),
    Column("input", Text, nullable=False),
    Column("result", LargeBinary, nullable=False),
    Column("at", UtcTime, nullable=False),
)
