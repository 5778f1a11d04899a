"""Requests and labels of divided endpoints in the order in which they came, for canaries."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"


def upgrade() -> None:
    op.create_table(
        "serving_observations",
        sa.Column("endpoint", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("number", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("requests", sa.Text(), nullable=False),
        sa.Column("scores", sa.Text(), nullable=False),
    )
