"""Studies of hyperparameters, and their trials."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0041"
down_revision = "0040"


def upgrade() -> None:
    op.create_table(
        "tuning_studies",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("settings", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("code", sa.Text(), sa.ForeignKey("governance_objects.id")),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("stopping", sa.Text()),
        sa.Column("best", sa.Text(), nullable=False),
        sa.Column("importance", sa.Text(), nullable=False),
        sa.Column("run", sa.Text(), sa.ForeignKey("governance_objects.id")),
        sa.Column("work", sa.Text(), sa.ForeignKey("governance_objects.id")),
        sa.Column("version", sa.Text()),
        sa.Column("ended_at", sa.BigInteger()),
    )
    op.create_table(
        "tuning_trials",
        sa.Column("study", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("params", sa.Text(), nullable=False),
        sa.Column("results", sa.Text(), nullable=False),
        sa.Column("reports", sa.Text(), nullable=False),
        sa.Column("pruning", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("job", sa.Text(), sa.ForeignKey("governance_objects.id")),
        sa.Column("run", sa.Text(), sa.ForeignKey("governance_objects.id")),
        sa.Column("asked", sa.Integer(), nullable=False),
        sa.Column("told", sa.Integer()),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("ended_at", sa.BigInteger()),
    )
