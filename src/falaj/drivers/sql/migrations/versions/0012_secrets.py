"""Secrets that jobs are given."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_table(
        "governance_secrets",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.Column("set_by", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("changed_at", sa.BigInteger(), nullable=False),
    )
