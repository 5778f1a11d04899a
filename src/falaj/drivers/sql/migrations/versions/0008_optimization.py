"""Optimizations, and the variants that they tried."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "optimization_optimizations",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("model", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("data", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("job", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("features", sa.Text(), nullable=False),
        sa.Column("budget", sa.Text(), nullable=False),
        sa.Column("report", sa.Text(), nullable=False),
    )
