"""Metrics that the platform computed on training sets, and predictions that no event has told of yet."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0047"
down_revision = "0044"


def upgrade() -> None:
    op.create_table(
        "registry_evaluations",
        sa.Column("version", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("data", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("target", sa.Text(), primary_key=True),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("skipped", sa.BigInteger(), nullable=False),
        sa.Column("output", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("by", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "serving_unannounced",
        sa.Column("endpoint", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("version", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("batches", sa.BigInteger(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("since", sa.BigInteger(), nullable=False),
        sa.Column("until", sa.BigInteger(), nullable=False),
        sa.Column("newest", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
    )
