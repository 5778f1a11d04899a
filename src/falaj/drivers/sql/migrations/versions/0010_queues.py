"""Queues, budgets, and what each attempt used."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

_ADD_DEFAULT = """
    INSERT INTO governance_objects (id, workspace, kind, name, owner, created_at)
    SELECT 'queue_0000000000000000000default', id, 'queue', 'default', owner, created_at
    FROM governance_objects WHERE id = 'platform'
"""
"""The queue that every platform has; one that is not founded yet makes its own."""


def upgrade() -> None:
    op.create_table(
        "scheduling_queues",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("parent", sa.Text(), sa.ForeignKey("governance_objects.id")),
        sa.Column("quota", sa.Text(), nullable=False),
        sa.Column("at_most", sa.Text()),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("workspaces", sa.Text()),
        sa.Column("version", sa.Integer(), nullable=False),
    )
    op.create_table(
        "scheduling_budgets",
        sa.Column("workspace", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("gpu_hours", sa.Double()),
        sa.Column("money", sa.Double()),
        sa.Column("period", sa.Text(), nullable=False),
        sa.Column("since", sa.BigInteger(), nullable=False),
        sa.Column("counted_from", sa.BigInteger()),
        sa.Column("counted_currency", sa.Text()),
        sa.Column("counted_gpu_hours", sa.Double(), nullable=False),
        sa.Column("counted_money", sa.Double(), nullable=False),
    )
    _create_usage()
    op.create_table(
        "scheduling_history",
        sa.Column("queue", sa.Text(), primary_key=True),
        sa.Column("half_life_s", sa.Double(), nullable=False),
        sa.Column("as_of", sa.BigInteger(), nullable=False),
        sa.Column("cpus", sa.Double(), nullable=False),
        sa.Column("gpus", sa.Double(), nullable=False),
        sa.Column("memory_bytes", sa.Double(), nullable=False),
    )
    op.create_table(
        "scheduling_comparisons",
        sa.Column("work", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
    )
    op.execute(_ADD_DEFAULT)


def _create_usage() -> None:
    op.create_table(
        "scheduling_usage",
        sa.Column("job", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("attempt", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("workspace", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("user_id", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("placements", sa.Text(), nullable=False),
        sa.Column("gpu_models", sa.Text(), nullable=False),
        sa.Column("borrows", sa.Boolean(), nullable=False),
        sa.Column("cpus", sa.BigInteger(), nullable=False),
        sa.Column("gpus_milli", sa.BigInteger(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("currency", sa.Text()),
        sa.Column("cpu_rate", sa.Double(), nullable=False),
        sa.Column("gpu_rate", sa.Double(), nullable=False),
        sa.Column("submitted_at", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.BigInteger(), nullable=False),
        sa.Column("ended_at", sa.BigInteger()),
        sa.Column("verdict", sa.Text()),
        sa.Column("gpu_hours", sa.Double()),
        sa.Column("cpu_hours", sa.Double()),
        sa.Column("cpu_s", sa.Double()),
        sa.Column("peak_memory_bytes", sa.BigInteger()),
        sa.Column("cpu_energy_j", sa.Double()),
        sa.Column("gpu_energy_j", sa.Double()),
        sa.Column("energy_cost", sa.Double()),
        sa.Column("cost", sa.Double()),
    )
    op.create_index("scheduling_usage_ended", "scheduling_usage", ["ended_at"])
    op.create_index("scheduling_usage_workspace", "scheduling_usage", ["workspace", "ended_at"])
    op.create_index("scheduling_usage_started", "scheduling_usage", ["started_at", "job", "attempt"])
    op.create_index("scheduling_usage_submitted", "scheduling_usage", ["submitted_at", "job", "attempt"])
