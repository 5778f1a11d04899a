"""Events in the order of the audit log, and the webhooks that receive them.

The outbox had no reader; what it says is in the audit log too, so it is not carried over.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0029"


def upgrade() -> None:
    op.drop_table("governance_outbox")
    op.create_table(
        "governance_events",
        sa.Column("seq", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("part", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("workspace", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "governance_webhooks",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("types", sa.Text(), nullable=False),
        sa.Column("secret", sa.LargeBinary(), nullable=False),
        sa.Column("paused", sa.Boolean(), nullable=False),
    )
    op.create_table(
        "governance_webhook_progress",
        sa.Column("webhook", sa.Text(), primary_key=True),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("delivered", sa.BigInteger(), nullable=False),
        sa.Column("delivered_at", sa.BigInteger()),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("failing_since", sa.BigInteger()),
        sa.Column("retry_at", sa.BigInteger()),
        sa.Column("error", sa.Text()),
    )
    op.create_table(
        "governance_undelivered_events",
        sa.Column("webhook", sa.Text(), primary_key=True),
        sa.Column("seq", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("part", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("given_up_at", sa.BigInteger(), nullable=False),
        sa.Column("redelivering", sa.Boolean(), nullable=False),
    )
