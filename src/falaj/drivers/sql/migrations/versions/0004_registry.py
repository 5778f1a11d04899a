"""The registry: models, their versions, aliases with their history, and approvals."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    _versions()
    _aliases()


def _versions() -> None:
    op.create_table(
        "registry_models",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("versions", sa.Integer(), nullable=False),
    )
    op.create_table(
        "registry_versions",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("model", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("manifest", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("signature", sa.Text(), nullable=False),
    )
    op.create_index("registry_versions_number", "registry_versions", ["model", "number"], unique=True)


def _aliases() -> None:
    op.create_table(
        "registry_aliases",
        sa.Column("model", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("alias", sa.Text(), primary_key=True),
        sa.Column("protected", sa.Boolean(), nullable=False),
    )
    op.create_table(
        "registry_alias_changes",
        sa.Column("model", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("alias", sa.Text(), primary_key=True),
        sa.Column("seq", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("version", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("previous", sa.Text(), sa.ForeignKey("governance_objects.id")),
        sa.Column("move", sa.Text(), nullable=False),
        sa.Column("by", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "registry_approvals",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("version", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("alias", sa.Text(), nullable=False),
        sa.Column("by", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("comment", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("withdrawn_at", sa.BigInteger()),
    )
    op.create_index("registry_approvals_version", "registry_approvals", ["version", "alias"])
