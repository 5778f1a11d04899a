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

from falaj.ports.metadata import METADATA, UNRECORDED, JsonText, UtcTime


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
    Index(
        "governance_objects_listed",
        "workspace",
        "kind",
        "id",
        sqlite_where=text("deleted_at IS NULL"),
        postgresql_where=text("deleted_at IS NULL"),
    ),
)

principals = Table(
    "governance_principals",
    METADATA,
    object_key(),
    Column("disabled_at", UtcTime),
    Column("created_by", JsonText),
)

group_members = Table(
    "governance_group_members",
    METADATA,
    Column("group_id", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("member", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("added_by", JsonText),
    Column("added_at", UtcTime),
    Index("governance_group_members_member", "member"),
)

grants = Table(
    "governance_grants",
    METADATA,
    Column("workspace", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("subject", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("role", Text, primary_key=True),
    Column("granted_by", JsonText),
    Column("granted_at", UtcTime),
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
    Column("vouched_by", JsonText),
    Index("governance_tokens_principal", "principal"),
)

sign_in_codes = Table(
    "governance_sign_in_codes",
    METADATA,
    Column("code_hash", LargeBinary, primary_key=True),
    Column("principal", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("expires_at", UtcTime, nullable=False),
    Column("vouched_by", JsonText),
    info=UNRECORDED,
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
    info=UNRECORDED,
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

stores = Table(
    "governance_stores",
    METADATA,
    Column("zone", Text, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("id", Text, nullable=False),
    Column("home", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("place", Text, nullable=False),
    info=UNRECORDED,
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
    Column("mac", LargeBinary, nullable=False),
    info=UNRECORDED,
)

audit_state = Table(
    "governance_audit_state",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("log_id", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("frontier", Text, nullable=False),
    Column("statements", JsonText),  # which witness a home has
    info=UNRECORDED,
)

audit_heads = Table(
    "governance_audit_heads",
    METADATA,
    Column("size", BigInteger, primary_key=True, autoincrement=False),
    Column("root", Text, nullable=False),
    Column("at", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("signature", Text, nullable=False),
    Column("frontier", Text, nullable=False),  # the tree under the root, from which signing goes on
    info=UNRECORDED,
)

events = Table(
    "governance_events",
    METADATA,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),  # of the audit entry of the call
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("id", Text, primary_key=True),  # a log that was cut gives a number again
    Column("type", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("workspace", Text, nullable=False),
    Column("data", JsonText, nullable=False),
    Column("at", UtcTime, nullable=False),
    info=UNRECORDED,
)

webhooks = Table(
    "governance_webhooks",
    METADATA,
    object_key(),
    Column("url", Text, nullable=False),
    Column("types", JsonText, nullable=False),
    Column("secret", LargeBinary, nullable=False),
    Column("paused", Boolean, nullable=False),
    Column("written_as", Text, nullable=False),
)

webhook_progress = Table(
    "governance_webhook_progress",
    METADATA,
    Column("webhook", Text, primary_key=True),
    Column("seq", BigInteger, nullable=False),  # the last event that was delivered, given up or not asked for
    Column("part", Integer, nullable=False),
    Column("delivered", BigInteger, nullable=False),
    Column("delivered_at", UtcTime),
    Column("attempts", Integer, nullable=False),  # failed ones, of the event after that
    Column("failing_since", UtcTime),
    Column("retry_at", UtcTime),
    Column("error", Text),
    info=UNRECORDED,
)

undelivered_events = Table(
    "governance_undelivered_events",
    METADATA,
    Column("webhook", Text, primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("attempts", Integer, nullable=False),
    Column("error", Text, nullable=False),
    Column("given_up_at", UtcTime, nullable=False),
    Column("redelivering", Boolean, nullable=False),
    info=UNRECORDED,
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
    info=UNRECORDED,
)

backups = Table(
    "governance_backups",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("caller", Text, nullable=False),
    Column("began_at", UtcTime, nullable=False),
    Column("held_until", UtcTime, nullable=False),
    Column("manifest", Text),
    info=UNRECORDED,
)

homes = Table("governance_homes", METADATA, Column("id", Text, primary_key=True), info=UNRECORDED)
