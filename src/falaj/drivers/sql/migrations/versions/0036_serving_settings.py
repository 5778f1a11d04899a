"""Settings of endpoints, and what the model server measured of their versions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0035"


def upgrade() -> None:
    op.create_table(
        "serving_settings",
        sa.Column("endpoint", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("settings", sa.Text(), nullable=False),
    )
    op.create_table(
        "serving_measurements",
        sa.Column("endpoint", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("version", sa.Text(), primary_key=True),
        sa.Column("measured", sa.Text(), nullable=False),
    )
