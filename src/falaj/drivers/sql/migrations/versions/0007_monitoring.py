"""Monitors, their windows and their alerts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    _monitors()
    _windows()
    _alerts()


def _monitors() -> None:
    op.create_table(
        "monitoring_monitors",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("endpoint", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("training_set", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("columns", sa.Text(), nullable=False),
        sa.Column("all_columns", sa.Boolean(), nullable=False),
        sa.Column("window", sa.Text(), nullable=False),
        sa.Column("budget", sa.Text(), nullable=False),
        sa.Column("reference_rows", sa.BigInteger(), nullable=False),
        sa.Column("reference", sa.LargeBinary(), nullable=False),
        sa.Column("alert", sa.Text(), sa.ForeignKey("governance_objects.id")),
    )
    op.create_index("monitoring_monitors_endpoint", "monitoring_monitors", ["endpoint"])


def _windows() -> None:
    op.create_table(
        "monitoring_endpoints",
        sa.Column("endpoint", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("seq", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "monitoring_slots",
        sa.Column("endpoint", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("version", sa.Text(), primary_key=True),
        sa.Column("seq", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("since", sa.BigInteger(), nullable=False),
        sa.Column("until", sa.BigInteger(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
    )
    op.create_table(
        "monitoring_positions",
        sa.Column("monitor", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("version", sa.Text(), primary_key=True),
        sa.Column("judged_seq", sa.BigInteger(), nullable=False),
        sa.Column("judged_until", sa.BigInteger()),
        sa.Column("verdict", sa.Text()),
        sa.Column("windows", sa.Integer(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("waiting_rows", sa.BigInteger(), nullable=False),
        sa.Column("waiting_since", sa.BigInteger()),
        sa.Column("due_at", sa.BigInteger()),
        sa.Column("own_columns", sa.Text(), nullable=False),
        sa.Column("own_reference", sa.LargeBinary()),
        sa.Column("report", sa.Text()),
    )
    op.create_index("monitoring_positions_due", "monitoring_positions", ["due_at"])


def _alerts() -> None:
    op.create_table(
        "monitoring_alerts",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("monitor", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("endpoint", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("columns", sa.Text(), nullable=False),
        sa.Column("words", sa.Text(), nullable=False),
        sa.Column("since", sa.BigInteger(), nullable=False),
        sa.Column("until", sa.BigInteger(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("rows_seen", sa.BigInteger(), nullable=False),
        sa.Column("raised_at", sa.BigInteger(), nullable=False),
        sa.Column("windows", sa.Integer(), nullable=False),
        sa.Column("last_until", sa.BigInteger(), nullable=False),
        sa.Column("acknowledged_by", sa.Text()),
        sa.Column("acknowledged_at", sa.BigInteger()),
        sa.Column("ended_at", sa.BigInteger()),
        sa.Column("report", sa.Text(), nullable=False),
    )
    op.create_index("monitoring_alerts_monitor", "monitoring_alerts", ["monitor", "id"])
