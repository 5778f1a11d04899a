"""Sticky routes of endpoints, and how the answers of shadows differ."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"


def upgrade() -> None:
    op.add_column("serving_endpoints", sa.Column("sticky", sa.Text()))
    op.create_table(
        "serving_shadows",
        sa.Column("endpoint", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("version", sa.Text(), primary_key=True),
        sa.Column("against", sa.Text(), primary_key=True),
        sa.Column("counts", sa.Text(), nullable=False),
        sa.Column("since", sa.BigInteger(), nullable=False),
    )
