"""Checkpoints in parts. Those of one piece are let go: a job that goes on from one begins anew."""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    delete = sa.text(
        "UPDATE governance_objects SET deleted_at = :now "
        "WHERE deleted_at IS NULL AND id IN (SELECT blob FROM training_checkpoints)"
    )
    op.get_bind().execute(delete, {"now": time.time_ns() // 1000})  # their bytes go with the next sweep
    op.drop_table("training_checkpoints")
    op.create_table(
        "training_checkpoints",
        sa.Column("job", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("step", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("save", sa.Text(), nullable=False),
        sa.Column("manifest", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("parts", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
    )
