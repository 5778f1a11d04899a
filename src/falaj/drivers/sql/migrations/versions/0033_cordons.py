"""Nodes that operators have taken out of service."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"


def upgrade() -> None:
    op.create_table(
        "scheduling_cordons",
        sa.Column("node", sa.Text(), primary_key=True),
        sa.Column("since", sa.BigInteger(), nullable=False),
        sa.Column("by", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("drained", sa.Boolean(), nullable=False),
    )
