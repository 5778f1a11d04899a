"""Rows that were set aside at ingestion, by file."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0049"
down_revision = "0047"


def upgrade() -> None:
    op.create_table(
        "features_quarantined_batches",
        sa.Column("view", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False, unique=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("data", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("by", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("is_history", sa.Boolean(), nullable=False),
        sa.Column("quarantined", sa.BigInteger(), nullable=False),
        sa.Column("ingested", sa.BigInteger(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("rules", sa.Text(), nullable=False),
    )
