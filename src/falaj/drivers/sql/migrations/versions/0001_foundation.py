"""The foundation: objects, identity, policy, audit, lineage, blobs, keys, and durable work."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    _objects()
    _identity()
    _policy()
    _storage()
    _lineage()
    _audit()
    _control()


def _objects() -> None:
    op.create_table(
        "governance_objects",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("workspace", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("zone", sa.Text()),
        sa.Column("label", sa.Text()),
        sa.Column("own_label", sa.Text()),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at", sa.BigInteger()),
    )
    op.create_index(
        "governance_objects_name",
        "governance_objects",
        ["workspace", "kind", "name"],
        unique=True,
        sqlite_where=sa.text("deleted_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NULL"),
    )


def _identity() -> None:
    op.create_table(
        "governance_principals",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("disabled_at", sa.BigInteger()),
    )
    op.create_table(
        "governance_group_members",
        sa.Column("group_id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("member", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
    )
    op.create_index("governance_group_members_member", "governance_group_members", ["member"])
    op.create_table(
        "governance_grants",
        sa.Column("workspace", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("subject", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("role", sa.Text(), primary_key=True),
    )
    op.create_index("governance_grants_subject", "governance_grants", ["subject"])
    op.create_table(
        "governance_tokens",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("principal", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("secret_hash", sa.LargeBinary(), nullable=False),
        sa.Column("scope", sa.Text(), sa.ForeignKey("governance_objects.id")),
        sa.Column("actions", sa.Text()),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("issuer", sa.Text()),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("revoked_at", sa.BigInteger()),
    )
    op.create_index("governance_tokens_principal", "governance_tokens", ["principal"])
    op.create_table(
        "governance_sign_in_codes",
        sa.Column("code_hash", sa.LargeBinary(), primary_key=True),
        sa.Column("principal", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
    )


def _policy() -> None:
    op.create_table(
        "governance_policies",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("version", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("published_at", sa.BigInteger(), nullable=False),
        sa.Column("withdrawn_at", sa.BigInteger()),
    )
    op.create_table(
        "governance_epochs",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
    )


def _storage() -> None:
    op.create_table(
        "governance_blobs",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("key", sa.Text(), nullable=False, unique=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("staged_until", sa.BigInteger()),
    )
    op.create_table(
        "governance_data_keys",
        sa.Column("workspace", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("version", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("root", sa.Text(), nullable=False),
        sa.Column("wrapped", sa.LargeBinary()),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("destroyed_at", sa.BigInteger()),
    )
    op.create_table(
        "governance_idempotency",
        sa.Column("caller", sa.Text(), primary_key=True),
        sa.Column("key", sa.Text(), primary_key=True),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("input", sa.Text(), nullable=False),
        sa.Column("result", sa.LargeBinary(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "governance_outbox",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("delivered", sa.Boolean(), nullable=False),
    )


def _lineage() -> None:
    op.create_table(
        "governance_activities",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("caller", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "governance_lineage_edges",
        sa.Column("source", sa.Text(), primary_key=True),
        sa.Column("target", sa.Text(), primary_key=True),
    )
    op.create_index("governance_lineage_edges_target", "governance_lineage_edges", ["target"])


def _audit() -> None:
    op.create_table(
        "governance_audit_entries",
        sa.Column("seq", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("caller", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("workspace", sa.Text()),
        sa.Column("leaf", sa.LargeBinary(), nullable=False),
        sa.Column("entry", sa.Text(), nullable=False),
    )
    op.create_table(
        "governance_audit_state",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("log_id", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("frontier", sa.Text(), nullable=False),
    )
    op.create_table(
        "governance_audit_heads",
        sa.Column("size", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("root", sa.Text(), nullable=False),
        sa.Column("at", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("signature", sa.Text(), nullable=False),
    )


def _control() -> None:
    op.create_table(
        "control_leases",
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "control_work",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("workflow", sa.Text(), nullable=False),
        sa.Column("input", sa.Text(), nullable=False),
        sa.Column("behalf", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("scope", sa.Text(), sa.ForeignKey("governance_objects.id")),
        sa.Column("actions", sa.Text()),
        sa.Column("token", sa.Text()),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("steps", sa.Integer()),
        sa.Column("doing", sa.Text()),
        sa.Column("result", sa.Text()),
        sa.Column("error", sa.Text()),
        sa.Column("cancelling", sa.Boolean(), nullable=False),
        sa.Column("ended_at", sa.BigInteger()),
    )
    op.create_index("control_work_state", "control_work", ["state"])
