"""Features: entities, versions of views, training sets."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "features_entities",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("definition", sa.Text(), nullable=False),
    )
    op.create_table(
        "features_views",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("version", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("definition", sa.Text(), nullable=False),
        sa.Column("keys", sa.Text(), nullable=False),
        sa.Column("table_version", sa.BigInteger()),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("online_version", sa.BigInteger()),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "features_training_sets",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("spine", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("spine_pin", sa.Text()),
        sa.Column("since", sa.BigInteger()),
        sa.Column("until", sa.BigInteger()),
        sa.Column("event_time", sa.Text(), nullable=False),
        sa.Column("views", sa.Text(), nullable=False),
        sa.Column("columns", sa.Text(), nullable=False),
        sa.Column("table_version", sa.BigInteger(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
    )
