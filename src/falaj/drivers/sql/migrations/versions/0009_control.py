"""Pipelines, whose behalf they run on, and their last start."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "control_pipelines",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("definition", sa.Text(), nullable=False),
        sa.Column("code", sa.Text(), sa.ForeignKey("governance_objects.id")),
        sa.Column("applied_by", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("started_at", sa.BigInteger()),
        sa.Column("cause", sa.Text()),
        sa.Column("work", sa.Text(), sa.ForeignKey("governance_objects.id")),
    )
