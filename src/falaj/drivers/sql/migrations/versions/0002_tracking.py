"""Tracking: runs, their parameters, tags, metrics and artifacts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    _runs()
    _metrics()


def _runs() -> None:
    op.create_table(
        "tracking_runs",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("experiment", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("ended_at", sa.BigInteger()),
    )
    op.create_index("tracking_runs_experiment", "tracking_runs", ["experiment", "id"])
    op.create_table(
        "tracking_params",
        sa.Column("run", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("key", sa.Text(), primary_key=True),
        sa.Column("value", sa.Text(), nullable=False),
    )
    op.create_table(
        "tracking_tags",
        sa.Column("run", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("key", sa.Text(), primary_key=True),
        sa.Column("value", sa.Text(), nullable=False),
    )
    op.create_table(
        "tracking_artifacts",
        sa.Column("run", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("path", sa.Text(), primary_key=True),
        sa.Column("blob", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("attached_at", sa.BigInteger(), nullable=False),
    )


def _metrics() -> None:
    op.create_table(
        "tracking_series",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("run", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("points", sa.BigInteger(), nullable=False),
        sa.Column("last", sa.Double()),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("last_at", sa.BigInteger(), nullable=False),
        sa.Column("low", sa.Double()),
        sa.Column("high", sa.Double()),
    )
    op.create_index("tracking_series_key", "tracking_series", ["run", "key"], unique=True)
    op.create_table(
        "tracking_points",
        sa.Column("series", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("step", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("at", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("value", sa.Double(), primary_key=True),
        sa.Column("is_nan", sa.Boolean(), primary_key=True),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "tracking_batches",
        sa.Column("run", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("batch", sa.Text(), primary_key=True),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("stored", sa.BigInteger(), nullable=False),
        sa.Column("repeated", sa.BigInteger(), nullable=False),
    )
