"""Backups, which keep stored bytes from being deleted while they are made; and the ids of homes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"


def upgrade() -> None:
    op.create_table(
        "governance_backups",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("caller", sa.Text(), nullable=False),
        sa.Column("began_at", sa.BigInteger(), nullable=False),
        sa.Column("held_until", sa.BigInteger(), nullable=False),
        sa.Column("manifest", sa.Text()),
    )
    op.create_table("governance_homes", sa.Column("id", sa.Text(), primary_key=True))
