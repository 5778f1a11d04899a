"""Jobs, and the attempts to run them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    _jobs()
    _attempts()


def _jobs() -> None:
    op.create_table(
        "training_jobs",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("inputs", sa.Text(), nullable=False),
        sa.Column("code", sa.Text(), sa.ForeignKey("governance_objects.id")),
        sa.Column("run", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("behalf", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("scope", sa.Text(), sa.ForeignKey("governance_objects.id")),
        sa.Column("actions", sa.Text()),
        sa.Column("token", sa.Text()),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("cancelling", sa.Boolean(), nullable=False),
        sa.Column("interrupting", sa.Boolean(), nullable=False),
        sa.Column("placements", sa.Text()),
        sa.Column("progress", sa.Text()),
        sa.Column("exit_code", sa.Integer()),
        sa.Column("outputs", sa.Text(), nullable=False),
        sa.Column("not_before", sa.BigInteger()),
        sa.Column("started_at", sa.BigInteger()),
        sa.Column("ended_at", sa.BigInteger()),
    )
    op.create_index("training_jobs_state", "training_jobs", ["state"])


def _attempts() -> None:
    op.create_table(
        "training_attempts",
        sa.Column("job", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("verdict", sa.Text()),
        sa.Column("reason", sa.Text()),
        sa.Column("exit_code", sa.Integer()),
        sa.Column("log", sa.Text(), sa.ForeignKey("governance_objects.id")),
        sa.Column("started_at", sa.BigInteger(), nullable=False),
        sa.Column("ended_at", sa.BigInteger()),
    )
    op.create_table(
        "training_checkpoints",
        sa.Column("job", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("step", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("blob", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
    )
