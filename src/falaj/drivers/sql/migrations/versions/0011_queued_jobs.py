"""What the queue knows of a job, beside its spec."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    for column in (
        sa.Column("request", sa.Text()),
        sa.Column("queue", sa.Text(), nullable=False, server_default=sa.text("'default'")),
        sa.Column("leaving", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("claim", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("borrows", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("evicted_for", sa.Text()),
        sa.Column("preemptions", sa.Integer(), nullable=False, server_default=sa.text("0")),
    ):
        op.add_column("training_jobs", column)
    op.create_table(
        "training_queue_changes",
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("count", sa.BigInteger(), nullable=False),
    )
